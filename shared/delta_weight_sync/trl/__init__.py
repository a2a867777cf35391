"""For TRL: weight transfer through a bucket, a trainer that resumes, and patches that TRL needs for both."""
