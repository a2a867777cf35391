"""What a hostile client, bucket or host may try: a file for each way that was found."""
