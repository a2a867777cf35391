"""One offline command that says whether and how fast the kernels run on this machine's GPU."""
