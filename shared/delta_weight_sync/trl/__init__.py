"""TRL: weight transfer through a bucket, a trainer that resumes, and the patches that TRL needs for it."""
