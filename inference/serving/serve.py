"""`draftsmith serve`: a local server with OpenAI's API, and a page to chat on.

It is for trying drafters and for evaluation with existing clients, not for production: batches take
no further requests, and prompts have no common prefix cache.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import Any

from ...heads.errors import UserError
from ..console import warn
from ..drafters import check_spec, load_proposer
from ..evaluation.measure import distinct_names
from ..evaluation.options import ServeOptions as Options
from ..evaluation.tuning.profile import TuningProfile
from ..proposer import Proposer
from ..proposers.plain import PlainDecoding
from ..targets.target import Target, load_for_decoding

KEY = "DRAFTSMITH_API_KEY"
EXTRA = {"starlette", "uvicorn", "prometheus_client"}


def if_interrupted(options: Options) -> str:
    """Return the line for a user who stops the server before it serves."""
    return "the server was not started"


def run(options: Options) -> None:
    """Serve until the user stops the server.

    Raises `UserError` for what cannot be loaded, an address that cannot be had, and packages that
    are missing.
    """
    app_module, uvicorn = packages()
    for spec in options.drafter:
        check_spec(spec)
    key = options.api_key or os.environ.get(KEY) or None
    # Before the target is loaded: the address may be taken.
    with listen(options.host, options.port) as bound:
        host, port = bound.getsockname()[:2]
        if key is None and hosts_of(host) == ["*"]:
            warn("everybody who reaches this machine can use the server; give an --api-key")
        target = load_for_decoding(options.target)
        proposers = [*proposers_of(options, target), PlainDecoding()]
        names = distinct_names(proposers)
        by_name = dict(zip(names, proposers, strict=True))
        engine = app_module.Engine(target, by_name, options.max_batch, options.queue)
        service = app_module.Service(
            engine,
            options.name or Path(target.name).name or target.name,
            names[0],
            options.sampling,
            options.max_new_tokens,
            key,
            hosts_of(options.host),
        )
        announce(service, host, port)
        config = uvicorn.Config(
            app_module.app_of(service),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=3,
        )

        class Server(uvicorn.Server):
            """Server that ends what is being decoded before it waits for its connections."""

            async def shutdown(self, sockets: Any = None) -> None:
                await asyncio.to_thread(engine.close)
                await super().shutdown(sockets)

        try:
            Server(config).run(sockets=[bound])
        except KeyboardInterrupt:  # uvicorn has closed everything before it raises this
            print("the server has stopped", file=sys.stderr)


def announce(service: Any, host: str, port: int) -> None:
    """Print the models and the addresses of a server on stderr."""
    for model, drafter in service.models.items():
        how = "drafts nothing" if drafter == "plain" else f"drafts with {drafter}"
        print(f"model {model}: {how}", file=sys.stderr)
    # An address that listens everywhere is none that can be opened.
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{port}"
    print(
        f"page: {address}\nOpenAI clients: {address}/v1\n"
        "For trying and for evaluation, not for production. Ctrl-C stops it.",
        file=sys.stderr,
        flush=True,
    )


def packages() -> tuple[Any, Any]:
    """Return the module of the application, and uvicorn. Raises `UserError` if one is missing."""
    try:
        import uvicorn

        from . import app
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        raise UserError(
            f"draftsmith serve needs the package {error.name}; pip install 'draftsmith[serve]'"
        ) from error
    return app, uvicorn


def proposers_of(options: Options, target: Target) -> list[Proposer]:
    """Return the drafters that are named, as a profile has tuned them if there is one."""
    profile = TuningProfile(options.profile, target) if options.profile is not None else None
    proposers = []
    for spec in options.drafter:
        tuned = None
        if profile is not None:
            tuned = profile.setting(spec, options.sampling.temperature, batch=1)
        proposers.append(load_proposer(spec, target, warn, tuned, choose=True))
    return proposers


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


def hosts_of(host: str) -> list[str]:
    """Return the names by which clients may address a server that is bound to `host`."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return ["localhost", "127.0.0.1", "[::1]", host] if local else ["*"]
