"""`python -m bench.fleet`: simulates one trainer and up to a thousand replicas with the library's own code.

Trainer and replicas are the real `Outbox`, `Shortcuts`, `RunWriter`, `Pruner`, `Follower`, `Watcher`,
`RunReader` and `Notifications`. Their threads take turns in simulated time (`clock`), their bucket is in
memory and answers as slowly as the Hub (`hub`), and weights are only counted, not computed (`machines`).
"""
