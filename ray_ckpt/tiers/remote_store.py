"""An object store that fails now and then: a few operations, each tried again and counted.

What others met there, and what is done about it:

- a flaky answer "404" was taken for an absence (ray#41137): only "not found" twice, with a pause between, is one;
  every other error is told as an error;
- an upload was not tried again (ray#55350): every operation is, with growing pauses, and ``retries`` counts it;
- keys expired after days, and the file system kept the old ones (ray#35524): when keys are refused, the next try
  opens it anew.

Nothing is ever renamed: stores copy and delete instead, and neither is one step.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from ray_ckpt.errors import RayCkptError, StorageError
from ray_ckpt.tiers.address import OpenFs, RemotePath, open_filesystem, shown, without_secrets
from ray_ckpt.tiers.retries import RetryRule, refused

CHUNK_BYTES = 8 << 20

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """What a listing says of one object or folder.

    Attributes:
        path: relative to what was listed.
        is_folder: whether it only stands for the objects below it.
        bytes: size; 0 for a folder.
        written_at: seconds since the epoch; 0 where the store does not say.
    """

    path: str
    is_folder: bool
    bytes: int
    written_at: float


class RemoteStore:
    """Objects below an address; threads may share one.

    Args:
        uri: the address, such as ``s3://bucket/path``.
        options: how often to try, and how long to wait.
        open_fs: opens the address; called again when keys are refused.
        sleep: waits for seconds.
        chance: a number from 0 to 1.

    Attributes:
        where: the address as people may see it.
        retries: failures after which something was tried again.
        reopened: how often keys were refused and the file system was opened anew.
    """

    def __init__(
        self,
        uri: str,
        *,
        options: RetryRule | None = None,
        open_fs: OpenFs = open_filesystem,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._uri, self._open_fs, self._sleep, self._chance = uri, open_fs, sleep, chance
        self.rule = options or RetryRule()
        self.where = RemotePath(shown(uri))
        self.retries = self.reopened = 0
        self._lock = threading.Lock()
        self._opened: tuple[Any, str] | None = None

    def read(self, path: str) -> bytes | None:
        """The whole of a small object, None when there is none.

        Raises:
            StorageError: it cannot be read, which does not mean that it is not there.
        """

        def action(fs: Any, base: str) -> bytes:
            with fs.open_input_stream(f"{base}/{path}") as stream:
                data: bytes = stream.read()
                return data

        return self._try("read", path, action)

    def size(self, path: str, *, sure: bool = True) -> int | None:
        """Bytes of an object, None when there is none.

        Args:
            path: of the object.
            sure: False believes a store that says once that there is none.

        Raises:
            StorageError: it cannot be looked at.
        """

        def action(fs: Any, base: str) -> int:
            # Opened, since what get_file_info says of an error is at times "not found".
            with fs.open_input_file(f"{base}/{path}") as file:
                return int(file.size())

        return self._try("look at", path, action, asks=2 if sure else 1)

    def write(self, path: str, data: bytes) -> None:
        """Puts a small object, in one request where the store can (S3 below 5 MiB): whole, or not at all.

        Raises:
            StorageError: it could not be written; whether it is there is not known.
        """
        self.upload(path, lambda: (data,))

    def upload(self, path: str, chunks: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """Puts an object; what is there of that name is replaced when all of it has arrived.

        Args:
            path: of the object.
            chunks: gives the content; called once for each try. What it raises, if it is an error of ours, is not
                tried again.

        Raises:
            StorageError: it could not be written. What is there may be half of it.
        """

        def action(fs: Any, base: str) -> None:
            place = f"{base}/{path}"
            stream, at_store = _open_output(fs, place), False
            try:
                for chunk in chunks():
                    at_store = True
                    stream.write(chunk)
                    at_store = False
                at_store = True
                stream.close()
            except BaseException:
                # An upload cannot be given up: a stream that is closed, or dropped, puts what it has. So it is
                # closed now, before the next try, and not by whoever forgets this error later.
                with contextlib.suppress(Exception):
                    stream.close()
                    if not at_store:
                        fs.delete_file(
                            place
                        )  # what the store took is a part, which must not look like all
                stream = None
                raise

        self._try("write", path, action, asks=0)

    def chunks(
        self, path: str, chunk_bytes: int = CHUNK_BYTES, *, sure: bool = True
    ) -> tuple[int, Iterator[bytes]] | None:
        """Size and content of an object, piece by piece; None when there is none. A piece that failed is read again.

        Args:
            path: of the object.
            chunk_bytes: size of a piece.
            sure: False believes a store that says once that there is none.

        Raises:
            StorageError: while it is read.
        """
        file: Any = None
        offset = 0

        def look(fs: Any, base: str) -> int:
            nonlocal file
            file = fs.open_input_file(f"{base}/{path}")
            return int(file.size())

        def piece(fs: Any, base: str) -> bytes:
            nonlocal file
            try:
                if file is None:
                    file = fs.open_input_file(f"{base}/{path}")
                data: bytes = file.read_at(min(chunk_bytes, size - offset), offset)
                return data
            except BaseException:
                file = None  # the next try opens it anew, with new keys perhaps
                raise

        def pieces() -> Iterator[bytes]:
            nonlocal offset
            while offset < size:
                data = self._try("read", path, piece)
                if not data:
                    return  # it went, or became shorter: whoever compares sizes will see it
                offset += len(data)
                yield data

        found = self._try("look at", path, look, asks=2 if sure else 1)
        if found is None:
            return None
        size = found
        return size, pieces()

    def list(self, folder: str = "", *, deep: bool = False) -> list[Item]:
        """What is in a folder; nothing when there is none.

        Args:
            folder: where.
            deep: also what is in the folders below, and then no folders.

        Raises:
            StorageError: it cannot be listed.
        """

        def action(fs: Any, base: str) -> list[Item]:
            from pyarrow.fs import FileSelector, FileType  # a quarter of a second

            root = f"{base}/{folder}".rstrip("/")
            # Of GCS pyarrow lists no folders but those that have an object of their own, which ours have not; and it
            # says of a folder without any in an error like all others that there is none.
            flat = fs.type_name == "gcs"
            selector = FileSelector(root, recursive=deep or flat, allow_not_found=flat)
            found = fs.get_file_info(selector)
            items = []
            for info in found:
                is_folder = info.type == FileType.Directory
                # The object that stands for an empty folder may be listed in it.
                if (deep and is_folder) or info.path.strip("/") == root.strip("/"):
                    continue
                stamp = info.mtime_ns
                items.append(
                    Item(
                        path=info.path.lstrip("/")[len(root.lstrip("/")) + 1 :],
                        is_folder=is_folder,
                        bytes=info.size or 0,
                        written_at=stamp / 1e9 if stamp and stamp > 0 else 0.0,
                    )
                )
            return _top(items) if flat and not deep else items

        return self._try("list", folder, action) or []

    def delete(self, path: str) -> None:
        """Deletes an object; one that is not there is no error.

        Raises:
            StorageError: it is still there, or may be.
        """
        self._try("delete", path, lambda fs, base: fs.delete_file(f"{base}/{path}"))

    def delete_below(self, folder: str) -> None:
        """Deletes all objects of a folder, and the folder.

        Raises:
            StorageError: some of them are still there, or may be.
        """
        if not folder.strip("/"):
            raise ValueError("the folder to delete is empty, which would be the whole storage")

        def action(fs: Any, base: str) -> None:
            from pyarrow.fs import FileSelector  # a quarter of a second

            place = f"{base}/{folder}"
            try:
                fs.delete_dir(place)
            except FileNotFoundError:
                raise
            except OSError:
                # Of a folder that is not there some stores say so in an error like all others.
                if fs.get_file_info(FileSelector(place, recursive=True, allow_not_found=True)):
                    raise

        self._try("delete", folder, action)

    def _try(
        self, verb: str, path: str, action: Callable[[Any, str], _T], *, asks: int = 2
    ) -> _T | None:
        """Does something until it succeeds; None when so many times there was no such object, 0 for never."""
        failures = missing = 0
        while True:
            fs = None
            try:
                fs, base = self._open()
                found = action(fs, base)
                if missing:
                    self._count()  # it was there all along
                return found
            except FileNotFoundError as error:
                if asks:
                    missing += 1
                    if missing == asks:
                        return None
                    self._sleep(self.rule.absent_pause_s)
                    continue
                failure: Exception = error
            except RayCkptError:
                raise  # no fault of the store
            except OSError as error:
                failure = error
            failures += 1
            if failures >= self.rule.tries:
                raise StorageError(self._words(verb, path, failure, failures)) from None
            self._count()
            if refused(failure):
                self._forget(fs)
            self._sleep(self.rule.pause_s(failures, self._chance()))

    def _open(self) -> tuple[Any, str]:
        with self._lock:
            if self._opened is None:
                self._opened = self._open_fs(self._uri, self.rule.timeout_s)
            return self._opened

    def _count(self) -> None:
        with self._lock:
            self.retries += 1

    def _forget(self, fs: Any) -> None:
        with self._lock:
            # Another thread may have opened it anew meanwhile.
            if self._opened is not None and self._opened[0] is fs:
                self._opened = None
                self.reopened += 1

    def _words(self, verb: str, path: str, error: Exception, tries: int) -> str:
        said = without_secrets(str(error), self._uri)
        if refused(error):
            fix = "Its keys are refused: renew them (for S3 AWS_ACCESS_KEY_ID and so on), or its rights"
        else:
            fix = "An error is not an absence: mend access to the storage"
        place = self.where / path if path else self.where
        return f"cannot {verb} {place}: {said} ({tries} {'try' if tries == 1 else 'tries'}). {fix}, then retry."


def _top(items: Iterable[Item]) -> list[Item]:
    """Of all objects of a folder what is in it itself, and the folders in which the others are."""
    found: dict[str, Item] = {}
    for item in items:
        name, below, _ = item.path.partition("/")
        if below:
            found[name] = Item(path=name, is_folder=True, bytes=0, written_at=0.0)
        else:
            found.setdefault(name, item)
    return [*found.values()]


def _open_output(fs: Any, place: str) -> Any:
    try:
        return fs.open_output_stream(place)
    except FileNotFoundError:
        # Stores need no folders; a disk does.
        fs.create_dir(place.rpartition("/")[0], recursive=True)
        return fs.open_output_stream(place)
