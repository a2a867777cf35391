"""What both halves need of a GPU: Triton, the digest's factors there, and a count of what is launched.

Triton comes with torch's and vLLM's builds for a GPU; nothing here is imported where there is none.
"""
