"""Small replacements for apex and pynvml, used only where the real packages are not installed."""
