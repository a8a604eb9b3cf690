"""The rules that replace CUDA names: the table, the makers, and one file per family of names."""
