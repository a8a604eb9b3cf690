"""A folder for PYTHONPATH: it migrates processes at `import torch` if their environment asks for it."""
