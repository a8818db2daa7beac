"""A session server that cannot write to the store: the rollout waits for the store, it has not failed."""

import pytest
from support.engine_clients import run
from support.upstream import ReceivedRequest, Response, serving

from headpond.config.sessions import Sessions
from headpond.errors import UNWRITTEN, BlobUnwritten
from headpond.playing.agent_sessions import SessionServers


@pytest.mark.parametrize("at", ["/sessions", "/seal"])
def test_an_unwritable_store_of_the_session_server_is_reported_as_such(at: str) -> None:
    def respond(request: ReceivedRequest) -> Response:
        if request.path.endswith(at):
            return Response(status=UNWRITTEN, body=b'{"error":{"message":"cannot write a/b: Disk quota exceeded"}}')
        url = f"{server.url}/sessions/1/v1"
        return Response(body=b'{"base_url":"%b","secret":"s","control_secret":"c"}' % url.encode())

    async def main() -> None:
        async with SessionServers.open(Sessions(urls=(server.url,))) as servers:
            with pytest.raises(BlobUnwritten, match="Disk quota exceeded"):
                async with servers.session({}) as session:
                    await session.seal("")

    with serving(respond) as server:
        run(main)
