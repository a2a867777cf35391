#!/bin/sh
# Python for vLLM's engine: without the Space's secrets, and without the Hub, as it reads local files only.
for name in $(env | sed -n 's/^\([A-Za-z_0-9]*\(TOKEN\|SECRET\|KEY\|PASSWORD\|CREDENTIAL\)[A-Za-z_0-9]*\)=.*/\1/p'); do
    unset "$name"
done
export HF_HUB_OFFLINE=1
exec "$ENGINE_PYTHON" "$@"
