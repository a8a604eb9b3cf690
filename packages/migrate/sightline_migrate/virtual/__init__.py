"""The CUDA runtime that scripts see: devices, memory, streams, and the classes they test with isinstance."""
