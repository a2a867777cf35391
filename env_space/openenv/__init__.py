"""OpenEnv's protocol, so that its stock clients can play."""
