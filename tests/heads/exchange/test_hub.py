"""What is said where the hub refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange.hub import Drafter, hub_remedy, upload


def answered(status: int) -> HfHubHTTPError:
    request = httpx.Request("POST", "http://hub")
    # Later versions of huggingface_hub have a package of another name for it.
    response: Any = httpx.Response(status, request=request)
    return HfHubHTTPError("refused", response=response)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (answered(401), "check the name, and log in with hf auth login"),
        (answered(403), "check the name, and log in with hf auth login"),
        (answered(404), "check the name"),
        (HFValidationError("a/b/c"), "write the name as OWNER/NAME"),
        (httpx.ConnectError("no route"), "check the name and the network"),
    ],
)
def test_hub_remedy_depends_on_the_error(error: Exception, remedy: str) -> None:
    assert hub_remedy(error) == remedy


def test_offline_hub_errors_do_not_suggest_login(tmp_path: Path) -> None:
    for call in (lambda: upload(tmp_path, "me/mine"), lambda: Drafter.from_pretrained("me/mine")):
        with pytest.raises(UserError, match="unset HF_HUB_OFFLINE|check the name and the network"):
            call()
