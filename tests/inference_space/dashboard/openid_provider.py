"""Whoever logs visitors in, on loopback: an OpenID provider that asks nobody for a password."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse


def provider(url: str, names: Iterator[str]) -> FastAPI:
    """The provider at `url`: whoever comes is the next of `names`."""
    app, key, nonces = FastAPI(), rsa.generate_private_key(65537, 2048), dict[str, str]()

    @app.get("/.well-known/openid-configuration")
    def configuration() -> dict[str, Any]:
        return {
            "issuer": url,
            "authorization_endpoint": f"{url}/authorize",
            "token_endpoint": f"{url}/token",
            "jwks_uri": f"{url}/keys",
            "id_token_signing_alg_values_supported": ["RS256"],
        }

    @app.get("/keys")
    def keys() -> dict[str, Any]:
        numbers = key.public_key().public_numbers()
        parts = {part: _number(getattr(numbers, part)) for part in ("n", "e")}
        return {"keys": [{"kty": "RSA", "kid": "1", "use": "sig", "alg": "RS256", **parts}]}

    @app.get("/authorize")
    def authorize(redirect_uri: str, state: str, nonce: str) -> RedirectResponse:
        nonces["a-code"] = nonce
        return RedirectResponse(f"{redirect_uri}&{urlencode({'code': 'a-code', 'state': state})}")

    @app.post("/token")
    async def token(request: Request) -> dict[str, Any]:
        form, name, now = await request.form(), next(names), int(time.time())
        claims = {"iss": url, "sub": "1", "aud": "the-space", "iat": now, "exp": now + 600}
        claims |= {"nonce": nonces[str(form["code"])], "name": name, "preferred_username": name}
        claims |= {"profile": f"{url}/{name}", "picture": ""}
        signed = _sign(key, {"alg": "RS256", "kid": "1"}, claims)
        return {"access_token": "t", "token_type": "bearer", "expires_in": 600, "id_token": signed}

    return app


def _sign(key: rsa.RSAPrivateKey, header: dict[str, Any], claims: dict[str, Any]) -> str:
    content = ".".join(_text(json.dumps(part).encode()) for part in (header, claims))
    return f"{content}.{_text(key.sign(content.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def _number(value: int) -> str:
    return _text(value.to_bytes((value.bit_length() + 7) // 8, "big"))


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
