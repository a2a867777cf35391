"""The trainer box: TRL's asynchronous GRPO, and the publisher that puts its weights into the bucket."""
