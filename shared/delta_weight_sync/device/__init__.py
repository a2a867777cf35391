"""What both halves need of a GPU: Triton, the digest's factors there, and a count of what is launched.

For the trainer also the diff: its kernels (`compare`), their table, their answer, and the memory they read.
Triton comes with torch's and vLLM's builds for a GPU; what needs it is imported only where there is one.
"""
