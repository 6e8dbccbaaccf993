"""Turn text into training data: Parquet rows of token ids, by Ray Data.

    python jobs/prepare.py --output ~/data/stdlib                   # this Python's own sources
    python jobs/prepare.py --output ~/data/mine --input corpus/ more.jsonl.gz
    ray job submit --working-dir . -- python jobs/prepare.py --output /shared/data

Files are read and tokenised in parallel by Ray Data tasks and arrive in the order of the corpus;
this process packs them into rows and writes the Parquet. The result depends on the text and the
options alone, never on the parallelism: same input, same bytes, same fingerprint. See
`ray_ckpt/data/corpus.py` for what is read, and `ray_ckpt/data/index.py` for what is written.

The output appears whole or not at all: it is made in the hidden folder `.NAME.preparing` beside it
and renamed at the end. What a killed run leaves there is removed by the next one.

Limits: one process writes, at about the speed of one disk; inputs must be readable under the same
path on every node, and the output on every node that will train.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import tyro
import xxhash
from ray.exceptions import RayError

from ray_ckpt.data.corpus import Corpus, list_corpus, standard_library
from ray_ckpt.data.index import (
    COLUMN,
    DataError,
    DataFile,
    DataIndex,
    content_fingerprint,
    load_index,
    write_index,
)
from ray_ckpt.data.tokenizer import TokenIds, Tokenizer, id_dtype, load_tokenizer, pack, read_task
from ray_ckpt.errors import ConfigError, RayCkptError

logger = logging.getLogger("ray_ckpt.prepare")

NICENESS = "RAY_worker_niceness"
"""Environment variable of Ray, spelt as Ray spells it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Turn text into training data: Parquet rows of token ids, by Ray Data."""

    output: str
    """Folder to make; must not exist or be empty, and be seen by every node that trains."""
    input: tuple[str, ...] = ()
    """Files or folders of .txt, .md, .rst, .py, .jsonl (field "text"), .parquet (column "text") and
    .gz of these; by default the running Python's standard library."""
    seq_len: int = 128
    """Token ids in a row."""
    tokenizer: str | None = None
    """A tokenizer.json of the `tokenizers` library; by default the 256 bytes and an end token."""
    end_token: str | None = None
    """Token of --tokenizer that ends a document; by default the first common one, such as </s>."""
    row_group_rows: int = 64
    """Rows in a row group, the unit in which training reads; only the last may be smaller."""
    rows_per_file: int = 16384
    """Rows in a Parquet file; a multiple of --row-group-rows."""
    max_rows: int | None = None
    """Stop after this many rows; by default all the text is used."""
    read_tasks: int | None = None
    """Parts in which the files are read, without influence on the result; by default two per CPU,
    more for a large corpus."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "row_group_rows", "rows_per_file", "max_rows", "read_tasks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
        if self.rows_per_file % self.row_group_rows:
            raise ConfigError(
                f"--rows-per-file {self.rows_per_file} must be a multiple of --row-group-rows "
                f"{self.row_group_rows}, so that all row groups are equal"
            )
        if self.end_token is not None and self.tokenizer is None:
            raise ConfigError("--end-token goes with --tokenizer: the byte tokenizer has its own")
        if not self.output:
            raise ConfigError("--output must name a folder")


@dataclass(kw_only=True, slots=True)
class Tally:
    """What went through the stream of token ids so far."""

    tokens: int = 0
    documents: int = 0
    skipped: int = 0


def prepare(options: PrepareOptions) -> DataIndex:
    """Make a data folder. Uses the Ray of this process or of RAY_ADDRESS, else one of its own.

    Raises:
        ConfigError: the output is a relative path inside a submitted job.
        DataError: the input cannot be used, or the output is in use or cannot be written; nothing
            is left behind.
        ModuleNotFoundError: --tokenizer without the `tokenizers` library.
    """
    started = time.monotonic()
    output = _check_output(options.output)
    corpus = list_corpus(options.input) if options.input else standard_library()
    tokenizer = load_tokenizer(options.tokenizer, end_token=options.end_token)
    num_bytes = sum(source.num_bytes for source in corpus.sources)
    logger.info(
        "preparing %d files, %.1f MB, into %s", len(corpus.sources), num_bytes / 1e6, output
    )
    if corpus.passed_over:
        reasons = ", ".join(f"{count} {why}" for why, count in sorted(corpus.passed_over.items()))
        logger.warning("files of the input folders that are not text are passed over: %s", reasons)

    tally = Tally()
    with _staging(output) as folder, _ray():
        stream = _token_stream(corpus, tokenizer, options, tally)
        files, digests = _write_files(stream, folder, tokenizer, options)
        _write_index(folder, files, digests, tokenizer, options, tally)
    index = load_index(output)
    if tally.skipped:
        logger.warning("%d files were left out because they do not decode", tally.skipped)
    logger.info(
        "prepared %d rows of %d %s token ids from %d documents in %.1f s: %d row groups in %d "
        "files, %d tokens that fill no row dropped, fingerprint %s, in %s",
        *(index.num_rows, index.seq_len, index.dtype, tally.documents),
        *(time.monotonic() - started, len(index.row_group_sizes), len(index.files)),
        *(index.dropped_tokens, index.fingerprint, output),
    )
    return index


def _check_output(name: str) -> Path:
    """Absolute path of the output folder, once it is clear that nothing would be touched there."""
    given = Path(name).expanduser()
    if not given.is_absolute() and "working_dir_files" in Path.cwd().parts:
        raise ConfigError(
            f"--output {name} is relative, but a submitted job runs in a temporary copy of its "
            "working directory, which vanishes: name an absolute path"
        )
    output = given.resolve()
    if output.is_dir():
        if any(output.iterdir()):
            raise DataError(
                f"--output {output} is not empty: nothing is overwritten; name another folder or "
                "empty this one"
            )
        if os.path.ismount(output):
            raise DataError(
                f"--output {output} is a mount point, which cannot be replaced in one step: name a "
                f"folder in it, such as {output / 'tokens'}"
            )
    elif output.exists():
        raise DataError(f"--output {output} is a file: name a folder that does not exist yet")
    return output


@contextlib.contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """A hidden empty folder beside the output that takes its name at the end, or goes."""
    folder = output.with_name(f".{output.name}.preparing")
    try:
        parents = [parent for parent in output.parents if not parent.exists()]
        output.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _not_writable(output, error) from error
    with _claimed(folder):
        try:
            yield folder
            # Takes the place of an empty folder; fails if it has been filled meanwhile.
            folder.rename(output)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            for parent in parents:
                with contextlib.suppress(OSError):
                    parent.rmdir()
            # Errors of the input come as DataError and those of a cluster as ConnectionError.
            if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
                raise _not_writable(output, error) from error
            raise


def _not_writable(output: Path, error: OSError) -> DataError:
    return DataError(
        f"--output {output} cannot be written ({error}): free space or mend permissions there, or "
        "name another folder; nothing was left behind"
    )


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Own the folder and empty what a killed run left, unless a living run is working in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        busy = f"{folder} is in use: another preparation is writing there; wait for it to end"
        try:
            # The lock dies with its process, so a leftover can be told from a run in progress.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(busy) from error
        except OSError:
            logger.warning("%s cannot be locked: do not prepare the same folder twice", folder)
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise DataError(busy)
        leftovers = list(folder.iterdir())
        if leftovers:
            logger.warning("removing what a killed preparation left in %s", folder)
        for leftover in leftovers:
            leftover.unlink()
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _ray() -> Iterator[None]:
    """The Ray of this process, that of RAY_ADDRESS, or a private one while it is needed."""
    import ray.data  # brings pandas along: half a second that a wrong option need not wait for

    data_logger = logging.getLogger("ray.data")
    level = data_logger.level
    mine = not ray.is_initialized()
    try:
        if mine:
            _start_ray()
        data_logger.setLevel(logging.ERROR)
        yield
    finally:
        data_logger.setLevel(level)
        if mine:
            ray.shutdown()


def _start_ray() -> None:
    address = os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
        return
    # Ray runs its workers at nice 15: beside two other busy processes on two cores they got so
    # little that the first task came after 50 s, and after 4 s with 0.
    before = os.environ.get(NICENESS)
    os.environ[NICENESS] = before or "0"
    try:
        # Not the default address: it would join any Ray that happens to run on this machine.
        ray.init(
            address="local",
            include_dashboard=False,
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
    finally:
        if before is None:
            del os.environ[NICENESS]


def _token_stream(
    corpus: Corpus, tokenizer: Tokenizer, options: PrepareOptions, tally: Tally
) -> Iterator[TokenIds]:
    """Token ids of the whole corpus in its order, in pieces; read in parallel."""
    import ray.data

    rows = [
        {"position": position, **dataclasses.asdict(source)}
        for position, source in enumerate(corpus.sources)
    ]
    cpus = int(ray.cluster_resources().get("CPU", 1))
    per_64_mib = sum(source.num_bytes for source in corpus.sources) >> 26
    blocks = min(len(rows), options.read_tasks or max(2 * cpus, per_64_mib))
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    with ray.data.DataContext.current(context):
        dataset = ray.data.from_items(rows, override_num_blocks=blocks).flat_map(
            functools.partial(read_task, tokenizer=tokenizer)
        )
    dtype = id_dtype(tokenizer.vocab_size).newbyteorder("<")
    limit = None if options.max_rows is None else options.max_rows * options.seq_len
    position = -1
    for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
        for row in batch.to_pylist():
            if row["error"]:
                raise DataError(row["error"])
            # The fingerprint rests on the order, so it is checked, not trusted.
            if row["position"] not in (position, position + 1):
                raise RuntimeError(f"file {row['position']} came after file {position}")
            position = row["position"]
            ids = np.frombuffer(row["ids"], dtype=dtype)
            if limit is not None:
                ids = ids[: limit - tally.tokens]
            tally.tokens += len(ids)
            tally.documents += row["documents"]
            tally.skipped += row["skipped"]
            yield ids
            if tally.tokens == limit:
                return


def _write_files(
    stream: Iterable[TokenIds], folder: Path, tokenizer: Tokenizer, options: PrepareOptions
) -> tuple[list[DataFile], list[str]]:
    """Pack and write all files; also the digest of the token ids of each."""
    dtype = id_dtype(tokenizer.vocab_size)
    schema = pa.schema([(COLUMN, pa.list_(pa.from_numpy_dtype(dtype), options.seq_len))])
    blocks = pack(stream, seq_len=options.seq_len, block_rows=options.row_group_rows, dtype=dtype)
    files: list[DataFile] = []
    digests: list[str] = []
    for first in blocks:
        rest = itertools.islice(blocks, options.rows_per_file // options.row_group_rows - 1)
        name = f"part-{len(files):05d}.parquet"
        row_groups, digest = _write_file(folder / name, itertools.chain([first], rest), schema)
        files.append(DataFile(path=name, row_groups=row_groups))
        digests.append(digest)
    return files, digests


def _write_file(
    path: Path, blocks: Iterable[TokenIds], schema: pa.Schema
) -> tuple[tuple[int, ...], str]:
    """Write one Parquet file, one row group per block [rows, seq_len]."""
    row_groups: list[int] = []
    digest = xxhash.xxh3_128()
    with open(path, "wb") as stream:
        # Page checksums let a reader that asks for them notice a flipped bit.
        with pq.ParquetWriter(
            stream, schema, compression="zstd", write_page_checksum=True
        ) as writer:
            for block in blocks:
                flat = np.ascontiguousarray(block).reshape(-1)
                ids = pa.FixedSizeListArray.from_arrays(pa.array(flat), type=schema.types[0])
                table = pa.Table.from_arrays([ids], schema=schema)
                writer.write_table(table, row_group_size=len(block))
                digest.update(flat.astype(flat.dtype.newbyteorder("<"), copy=False).data)
                row_groups.append(len(block))
        stream.flush()
        os.fsync(stream.fileno())
    return tuple(row_groups), digest.hexdigest()


def _write_index(
    folder: Path,
    files: Sequence[DataFile],
    digests: Sequence[str],
    tokenizer: Tokenizer,
    options: PrepareOptions,
    tally: Tally,
) -> None:
    num_rows = sum(sum(file.row_groups) for file in files)
    if num_rows == 0:
        raise DataError(
            f"the input holds {tally.tokens} token ids, fewer than one row of --seq-len "
            f"{options.seq_len}: name more text by --input or choose shorter rows"
        )
    dtype = id_dtype(tokenizer.vocab_size).name
    write_index(
        DataIndex(
            root=str(folder),
            files=tuple(files),
            column=COLUMN,
            seq_len=options.seq_len,
            vocab_size=tokenizer.vocab_size,
            fingerprint=content_fingerprint(
                seq_len=options.seq_len, dtype=dtype, files=files, token_digests=digests
            ),
            dtype=dtype,
            tokenizer=tokenizer.name,
            end_token=tokenizer.end_token,
            num_documents=tally.documents,
            dropped_tokens=tally.tokens - num_rows * options.seq_len,
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for bad data, 2 for bad usage."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if sum(argument.split("=")[0] == "--input" for argument in arguments) > 1:
        # The parser would take the last one and forget the others.
        print("error: --input is given twice: name all inputs after one --input", file=sys.stderr)
        return 2
    options = tyro.cli(PrepareOptions, args=arguments)
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("ray_ckpt").setLevel(logging.INFO)
    try:
        prepare(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RayCkptError, ModuleNotFoundError, OSError, RayError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
