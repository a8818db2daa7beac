"""Revoking saves work and is never waited for."""

import asyncio
import logging
import socket
from pathlib import Path

import pytest
from support.ledgers import configured

from orchestrator import shutdown
from orchestrator.broker import Broker
from orchestrator.ledger.ledger import Ledger
from orchestrator.reply_stream import ReplyStream
from orchestrator.shutdown import Shutdown


async def revoke(url: str, ledger: Ledger, directory: Path, *, times: int = 1) -> None:
    config = configured(run_dir=directory, redis_url=url)
    broker = Broker(url)
    end = Shutdown(config, "run", ledger, broker, ReplyStream("run", broker, ledger))
    for _ in range(times):
        await end.revoke(["run.g0000000-0.1"])
    await broker.close()


def test_a_redis_that_does_not_answer_delays_nothing(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutdown, "REVOKE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.WARNING):

        async def main() -> None:
            await revoke(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", ledger, tmp_path, times=2)
            silent.shutdown(socket.SHUT_RDWR)

        asyncio.run(main())
    assert "Redis has not answered in 0.2 s" in caplog.text
    assert "the call before has not returned" in caplog.text


def test_a_redis_that_is_away_ends_nothing(ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        asyncio.run(revoke("redis://127.0.0.1:9/0", ledger, tmp_path))
    assert "action=not_revoked" in caplog.text
