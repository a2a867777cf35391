"""What a hostile client, bucket or host may try; the numbers are those of the table in SECURITY.md."""
