"""Research behind the library: a paired study, a data set of weight changes, and an earlier delta format."""
