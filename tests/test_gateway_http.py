"""The gateway's manners: who is let in, what is too much, and clients that misbehave."""

from __future__ import annotations

import base64
import gc
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spoold.errors import AddressInUse, ConfigError
from tests.support.gateways import Client, Reply, ask, needs_http, serving
from tests.support.handmade import ls, make_run_dir, put, sample
from tests.support.processes import until

POSTS = ("/get_rollout_data", "/ack_rollout_data", "/rewind", "/start_rollout")


@pytest.fixture(autouse=True)
def gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_http()
    monkeypatch.setattr("spoold.gateway.app.WAIT_SECONDS", 0.05)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_dir(tmp_path / "run")


@pytest.fixture
def client(run: Path) -> Iterator[Client]:
    with serving(run) as client:
        yield client


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One for all requests that change nothing."""
    with serving(make_run_dir(tmp_path_factory.mktemp("idle") / "run")) as client:
        yield client


def is_refusal(reply: Reply, status: int) -> bool:
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["success"] is False
    assert len(reply.json["message"]) > 5
    return reply.status == status


# --- bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"3", b'"x"', b"\xff\xfe", b"NaN", b'{"step": NaN}', b"[" * 50_000,
     b'{"a": "\\ud800"}', b"\0" * 10],
)  # fmt: skip
def test_what_is_no_json_object_is_refused_in_words(idle: Client, path: str, body: bytes) -> None:
    assert is_refusal(ask(idle.url, path, body=body), 400)


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        *(("/get_rollout_data", {"max_groups": bad}) for bad in (0, -1, 1.5, "3", True, 2**63, [])),
        *(("/ack_rollout_data", {"batch_id": bad}) for bad in (None, 3, [], {})),
        ("/ack_rollout_data", {}),
        *(
            ("/ack_rollout_data", {"batch_id": "x", "step": bad})
            for bad in (-1, "3", True, 10**18, 10**40)
        ),
        *(("/rewind", facts) for facts in ({}, {"step": -2}, {"step": "3"}, {"step": False})),
        *(("/start_rollout", {"num_repeat_per_sample": bad}) for bad in (0, "x", 1.5, True)),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_name(
    idle: Client, path: str, facts: dict[str, object]
) -> None:
    reply = ask(idle.url, path, facts)
    assert is_refusal(reply, 400)
    assert any(f'"{name}"' in reply.json["message"] for name in facts or ("batch_id", "step"))


@pytest.mark.parametrize("body", [b"", b"  ", b"{}", b'{"unknown": [1, 2]}'])
def test_a_get_needs_no_body_and_passes_over_what_it_does_not_know(
    client: Client, run: Path, body: bytes
) -> None:
    name = put(run, 1)
    assert ask(client.url, "/get_rollout_data", body=body).batch_id == name.id


@pytest.mark.parametrize("path", POSTS)
def test_a_body_that_says_it_is_too_large_is_not_read(idle: Client, path: str) -> None:
    length = {"content-length": str(100 << 20)}
    assert is_refusal(ask(idle.url, path, body=b"{", headers=length), 413)


def test_a_body_that_grows_too_large_is_not_kept(idle: Client) -> None:
    host, port = idle.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as sent:
        head = "POST /ack_rollout_data HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        sent.sendall(head.encode())
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        sent.sendall(chunk + chunk)
        assert sent.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_that_comes_too_slowly_is_refused(
    idle: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spoold.gateway.requests.BODY_SECONDS", 0.1)
    reply = ask(idle.url, "/rewind", body=b"{", headers={"content-length": "100"})
    assert is_refusal(reply, 408)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("POST", "/", 404), ("GET", "/get_rollout_data", 405),
     ("DELETE", "/ack_rollout_data", 405), ("POST", "/health", 405)],
)  # fmt: skip
def test_another_path_or_method_is_refused_in_words(
    idle: Client, method: str, path: str, status: int
) -> None:
    reply = ask(idle.url, path, method=method)
    assert is_refusal(reply, status)
    assert ("allow" in reply.headers) == (status == 405)


def test_it_describes_itself(idle: Client) -> None:
    described = ask(idle.url, "/openapi.json", method="GET").json
    assert set(described["paths"]) == {*POSTS, "/health", "/openapi.json"}


def test_several_requests_may_share_a_connection(client: Client, run: Path) -> None:
    name = put(run, 1)
    request = b"POST /get_rollout_data HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    host, port = client.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as pipelined:
        pipelined.sendall(request * 5)
        came = b""
        while came.count(name.id.encode()) < 10:  # in the words and in meta_info
            piece = pipelined.recv(65536)
            assert piece
            came += piece


# --- the token -----------------------------------------------------------------------------------

TOKEN = "s3cret-token"


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("authorization", "is_let_in"),
    [(f"Bearer {TOKEN}", True), (f"bearer {TOKEN}", True), (basic(f"spoold:{TOKEN}"), True),
     (None, False), ("", False), ("Bearer", False), ("Bearer ", False), (TOKEN, False),
     (f"Bearer {TOKEN}x", False), (basic(TOKEN), False), (basic("spoold:"), False),
     ("Basic %%%", False), ("Basic /w==", False), ("Bearer \xe9", False)],
)  # fmt: skip
def test_with_a_token_only_who_has_it_is_let_in(
    run: Path, authorization: str | None, is_let_in: bool
) -> None:
    put(run, 1)
    headers = {} if authorization is None else {"authorization": authorization}
    with serving(run, token=TOKEN) as client:
        for path in POSTS:
            reply = ask(client.url, path, {"batch_id": "x", "step": 1}, headers=headers)
            assert (reply.status != 401) is is_let_in
            if not is_let_in:
                assert is_refusal(reply, 401)
                assert "www-authenticate" in reply.headers
        told = client.health(headers=headers)
    assert told.status == 200
    assert ("message" in told.json) is is_let_in
    assert ls(run)[0].startswith("pending/")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_without_a_token_only_this_host_is_listened_to(host: str) -> None:
    from spoold.gateway.server import listen

    with pytest.raises(ConfigError, match=f"others can reach {host}, and no token is set"):
        listen(host, 0, is_guarded=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.8.8.8"])
def test_loopback_needs_no_token(host: str) -> None:
    from spoold.gateway.server import listen

    sockets = listen(host, 0, is_guarded=False)
    assert sockets
    for bound in sockets:
        with bound:
            assert ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def test_an_address_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from spoold.gateway.server import listen

    (bound,) = listen("127.0.0.1", 0, is_guarded=False)
    port = bound.getsockname()[1]
    with bound, pytest.raises(AddressInUse, match=f"127.0.0.1 port {port}: address already in"):
        listen("127.0.0.1", port, is_guarded=False)
    with pytest.raises(ConfigError, match=r"192.0.2.1 port 0: cannot assign"):
        listen("192.0.2.1", 0, is_guarded=True)

    def no_such_name(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    with pytest.raises(ConfigError, match="cannot listen on gpu9: Name or service not known"):
        listen("gpu9", 0, is_guarded=True)


# --- clients that misbehave ----------------------------------------------------------------------


def connect(client: Client, data: bytes = b"") -> socket.socket:
    host, port = client.url.removeprefix("http://").split(":")
    connected = socket.socket()
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connected.settimeout(30)
    connected.connect((host, int(port)))
    connected.sendall(data)
    return connected


GET = b"POST /get_rollout_data HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


def is_ended(connected: socket.socket) -> bool:
    try:
        while connected.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("said", [b"", b"POST /get_rol", GET + GET[:20], GET])
def test_a_connection_without_a_whole_request_is_ended(
    client: Client, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr("spoold.gateway.server.IDLE_SECONDS", 0.2)
    with connect(client, said) as connected:
        began = time.monotonic()
        assert is_ended(connected)
        assert time.monotonic() - began < 4.9  # the server's own patience


def test_a_connection_that_is_over_is_not_kept_until_it_would_be_looked_at(client: Client) -> None:
    def kept() -> int:
        gc.collect()
        return sum(type(one).__name__ == "_Connection" for one in gc.get_objects())

    for _ in range(20):
        with connect(client, b"\x16\x03\x01" * 1000) as connected:
            assert is_ended(connected)
    began = time.monotonic()
    while kept() > 2:
        assert time.monotonic() - began < 7.5  # half of the time after which it is looked at
        assert client.health().status == 200


def big(run: Path, seq: int) -> None:
    put(run, seq, samples=[sample(seq) | {"messages": [{"content": "x" * (12 << 20)}]}])


def test_a_slow_reader_holds_up_nobody_and_is_dropped_in_the_end(
    client: Client, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spoold.gateway.server.IDLE_SECONDS", 0.2)
    monkeypatch.setattr("spoold.gateway.server.ANSWER_SECONDS", 1.5)
    big(run, 1)
    with connect(client, GET) as slow:
        assert slow.recv(100).startswith(b"HTTP/1.1 200")
        assert len(client.get().body) > 12 << 20
        time.sleep(2.5)
        assert is_ended(slow)


def test_a_reader_that_takes_its_time_gets_all(client: Client, run: Path) -> None:
    put(run, 1, samples=[sample(1) | {"messages": [{"content": "x" * (2 << 20)}]}])
    with connect(client, GET) as slow:
        came = bytearray()
        while b"batch_id" not in came[-200:]:
            came += slow.recv(1 << 20)
            time.sleep(0.0005)
    assert json.loads(came.partition(b"\r\n\r\n")[2])["success"] is True


def test_a_stop_does_not_wait_for_a_slow_reader_for_ever(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spoold.gateway.server.GRACE_SECONDS", 0.3)
    big(run, 1)
    with serving(run) as client:
        slow = connect(client, GET)
        slow.recv(100)
    slow.close()
    assert [path.split("/")[0] for path in ls(run)] == ["pending"]


def test_a_stop_waits_for_an_answer_that_is_being_read(run: Path) -> None:
    big(run, 1)
    with serving(run) as client:
        slow = connect(client, GET)
        assert slow.recv(100).startswith(b"HTTP/1.1 200")
        came: list[int] = []
        reader = threading.Thread(target=lambda: came.append(_read_all(slow)))
        reader.start()
    reader.join(30)
    assert came[0] > 12 << 20


def _read_all(connected: socket.socket) -> int:
    total = 0
    with connected:
        while piece := connected.recv(1 << 16):
            total += len(piece)
    return total


def test_a_stop_does_not_wait_for_a_batch_to_come(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spoold.gateway.app.WAIT_SECONDS", 300.0)
    with serving(run) as client:
        waiting = connect(client, GET)
        for _ in range(3):
            client.health()  # by then the one before has been read
    with waiting:
        assert b'"success":false,"message":"the gateway is stopping"' in waiting.recv(65536)


def test_half_closed_and_broken_requests_leave_the_spool_as_it_was(
    client: Client, run: Path
) -> None:
    name = put(run, 1)
    for said in (GET, GET[:-2], b"\r\n\r\n", b"\x16\x03\x01\x02", b"GET / HTTP/9.9\r\n\r\n"):
        with connect(client, said) as connected:
            connected.shutdown(socket.SHUT_WR)
            assert is_ended(connected)
    until(lambda: client.get().batch_id == name.id, "the batch")
    assert ls(run) == [f"inflight/gateway/{name.file_name}"]
    assert client.ack(name.id).status == 200
