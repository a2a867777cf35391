"""Refusals as the Hub words them: huggingface_hub picks its exception by status, code and message."""


class HubError(Exception):
    """An answer that is not a success; `code` and `message` go into X-Error-Code and X-Error-Message.

    `url` is where on the Hub the thing is that stands in the way.
    """

    def __init__(self, status: int, message: str, code: str = "", url: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.url = status, message, code, url


def repo_missing(*, anonymous: bool = False) -> HubError:
    """Also what a stranger is told of something private."""
    return HubError(401 if anonymous else 404, "Repository not found", "RepoNotFound")


def entry_missing(message: str = "Entry not found") -> HubError:
    return HubError(404, message, "EntryNotFound")
