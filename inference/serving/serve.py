"""`draftsmith serve`: a local server with OpenAI's API and a chat page.

It is for trying drafters and for evaluation with existing clients, not for production: batches take
no further requests, and prompts share no prefix cache.
"""

from __future__ import annotations

import gc
import ipaddress
import os
import signal
import socket
import sys
from importlib.util import find_spec

from ...heads.errors import UserError
from ...heads.files import JsonObject
from ..base.console import warn
from ..base.settings import read_key
from ..evaluation.measure import distinct_names
from ..profile import read_profile, tuned_setting
from ..proposers.contract import Proposer
from ..proposers.ngram import PlainDecoding
from ..proposers.registry import check_spec, load_proposer
from ..targets.target import load_for_decoding
from ..targets.target_files import other_sampling
from .options import ServeOptions as Options

KEY = "DRAFTSMITH_API_KEY"
KERNELS = "64"
"""Matrix products for which oneDNN and its wrapper in torch each cache a kernel. Each length of a
prompt needs several; the default of 1,024 took 550 MB with 200 lengths."""
EXTRA = ("starlette", "uvicorn", "prometheus_client")


def if_interrupted(_options: Options) -> str:
    """Return the line for a user who stops the server before it serves."""
    return "the server was not started"


def run(options: Options) -> None:
    """Serve until the user stops the server.

    Raises `UserError` for what cannot be loaded, an address that cannot be bound, a key that cannot
    be read, and packages that are missing.
    """
    # The libraries read these variables at the first product.
    for capacity in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(capacity, KERNELS)
    # Everything that does not need the target is checked before it is loaded.
    for package in EXTRA:
        if find_spec(package) is None:
            raise UserError(
                f"draftsmith serve needs the package {package}; in the checkout: "
                "pip install -c constraints.txt -e '.[serve]'"
            )
    from .app import DecodingServer, Service, app_of
    from .engine import Engine

    for spec in options.drafter:
        check_spec(spec)
    if options.profile is not None:
        read_profile(options.profile)
    key = read_key(os.environ.get(KEY), options.api_key_file, "--api-key-file")
    with listen(options.host, options.port) as bound:
        host, port = bound.getsockname()[:2]
        hosts = hosts_of(host, options.host)
        if key is None and hosts == ["*"]:
            warn("everyone who can reach this machine can use the server; give an --api-key-file")
        target = load_for_decoding(options.target)
        if other := other_sampling(target.model.generation_config, options.sampling):
            warn(f"target {target.name}: its {other}")
        proposers: list[Proposer] = []
        for spec in options.drafter:
            temperature = options.sampling.temperature
            tuned = tuned_setting(options.profile, spec, target, temperature)
            proposers.append(load_proposer(spec, target, warn, tuned, choose=True))
        proposers.append(PlainDecoding())
        names = distinct_names(proposers)
        by_name = dict(zip(names, proposers, strict=True))
        engine = Engine(target, by_name, options.batch_size)
        service = Service(engine, options.sampling, options.max_new_tokens, key, hosts)
        # Without this, Python's collector would traverse everything loaded again and again while a
        # request of many values is parsed, and block all threads.
        gc.collect()
        gc.freeze()
        server = DecodingServer(app_of(service), engine)
        with server.signals_stop_server():
            announce(service.models, host, port)
            server.run(sockets=[bound])
        print("the server has stopped", file=sys.stderr)
        if server.stopped_by == signal.SIGTERM:  # which has its own exit status
            raise SystemExit(128 + signal.SIGTERM)


def announce(models: dict[str, JsonObject], host: str, port: int) -> None:
    """Print the models, each with its drafter, and the addresses of a server on stderr."""
    for model, entry in models.items():
        drafter = entry["drafter"]
        how = "drafts nothing" if drafter == "plain" else f"drafts with {drafter}"
        print(f"model {model}: {how}", file=sys.stderr)
    # Clients cannot open the address that listens on all interfaces.
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{port}"
    print(
        f"page: {address}\nOpenAI clients: {address}/v1\n"
        "For trying and for evaluation, not for production. Ctrl-C stops it.",
        file=sys.stderr,
        flush=True,
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. Raises `UserError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = reason.partition(" (while")[0]  # Python repeats the address in its own form
        raise UserError(
            f"cannot listen on {host}, port {port} ({reason}); give another --port or --host"
        ) from error


def hosts_of(bound: str, named: str) -> list[str]:
    """Return the names by which clients may address a server that listens at the address `bound`.

    `named` is the user's name for that address. All names are allowed if other machines can reach
    it, since its names are not known then.
    """
    address = ipaddress.ip_address(bound)
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    if not (mapped or address).is_loopback:
        return ["*"]
    names = ["localhost", "127.0.0.1", "::1", bound, named]
    return [f"[{name}]" if ":" in name else name for name in dict.fromkeys(names)]
