"""A folder for PYTHONPATH: processes that find it there are migrated at `import torch` if their environment asks."""
