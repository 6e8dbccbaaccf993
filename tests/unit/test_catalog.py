"""Which data a run is trained on: what is accepted, what is refused, and what stays the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ckpt import trainer
from ray_ckpt.config import Config, ReadingConfig
from ray_ckpt.data.catalog import DataSource, MixedIndex, load_data, parse_sources
from ray_ckpt.data.feed import LocalFeed
from ray_ckpt.data.index import DataError, load_index, write_index
from ray_ckpt.data.mixture import MixedOrder
from ray_ckpt.data.order import GlobalOrder
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.errors import ConfigError
from ray_ckpt.facts import check_run, global_order
from ray_ckpt.options import load_toml, parse
from ray_ckpt.trainer import resolve


def make_data(
    folder: Path, rows: int, kind: Any = None, seq_len: int = 4, first: int = 0, **facts: Any
) -> str:
    """A folder of rows whose tokens are their numbers; with ``facts`` it gets an index that says them."""
    folder.mkdir(parents=True)
    kind = kind or pa.list_(pa.uint16(), seq_len)
    values = np.repeat(np.arange(first, first + rows), seq_len).reshape(rows, seq_len).tolist()
    table = pa.table({"tokens": pa.array(values, type=kind)})
    pq.write_table(table, folder / "part.parquet", row_group_size=5)
    if facts:
        write_index(replace(load_index(folder), **facts))
    return str(folder)


def config_of(folder: Path, *data: str, **more: Any) -> Config:
    base = Config(
        run="r",
        storage=str(folder / "runs"),
        data=data,
        workers="1",
        global_batch=6,
        micro_batch=2,
        seq_len=4,
    )
    return replace(base, **more)


class TestParse:
    def test_a_plain_path_is_one_source_without_a_name(self):
        for path in ("/data/web", "web", "/data/a=b:3", "./year=2024", "/odd:7", "~/x"):
            assert parse_sources([path]) == (DataSource(name="", path=path),)
        assert parse_sources([]) == ()

    def test_a_named_source_has_a_path_and_a_weight(self):
        found = parse_sources(["web=/data/web:7", "code-2.1=../c:d=e:3"])
        assert found == (
            DataSource(name="web", path="/data/web", weight=7),
            DataSource(name="code-2.1", path="../c:d=e", weight=3),
        )
        assert parse_sources([str(source) for source in found]) == found

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            (["web=/a:0"], "weight '0' must be a whole number of at least 1"),
            (["web=/a:-1"], "weight '-1'"),
            (["web=/a:1.5"], "weight '1.5'"),
            (["web=/a:"], "weight ''"),
            (["web=/a:x"], "weight 'x'"),
            (["web=/a:٣"], "whole number"),
            (["web=/a"], "lacks a path or a weight; write NAME=PATH:WEIGHT"),
            (["web=:3"], "lacks a path"),
            (["web="], "lacks a path"),
            (["=/a:3"], "name is missing"),
            (["web=/a:1", "web=/b:1"], "web=...: the name is given twice"),
            (["/a", "/b"], "--data /a: several sources need a name"),
            (["web=/a:1", "/b"], "--data /b: several sources need a name"),
            (["web=/a:9999", "code=/b:2"], "weights add up to 10001, the most is 10000"),
        ],
    )
    def test_what_is_neither_is_refused_with_the_way_out(self, values, words):
        with pytest.raises(ConfigError) as caught:
            Config(data=tuple(values))
        assert words in str(caught.value)
        assert str(caught.value).startswith("--data")


class TestOptions:
    def test_the_flag_may_be_given_several_times(self):
        assert parse(Config, []).data == ()
        assert parse(Config, ["--data", ""]).data == ()
        assert parse(Config, ["--data", "/a"]).data == ("/a",)
        two = parse(Config, ["--data", "a=/a:1", "--data", "b=/b:2"])
        assert two.data == ("a=/a:1", "b=/b:2")
        assert [source.weight for source in two.sources] == [1, 2]

    def test_a_program_may_give_one_path(self):
        assert Config(data="/a").data == ("/a",)
        assert Config(data=Path("/a")).data == ("/a",)
        assert Config(data="").data == Config(data=()).data == ()

    def test_a_file_may_say_a_word_or_a_list_and_flags_win(self, tmp_path):
        path = tmp_path / "run.toml"
        path.write_text('data = "/a"\n')
        assert load_toml(Config, path).data == ("/a",)
        assert parse(Config, ["--config", str(path), "--data", "/b"]).data == ("/b",)
        path.write_text('data = ["a=/a:1", "b=/b:2"]\n[saving]\nallow-missing = "ema"\n')
        found = parse(Config, ["--config", str(path), "--steps", "7"])
        assert (found.data, found.saving.allow_missing) == (("a=/a:1", "b=/b:2"), ("ema",))
        args = ["--config", str(path), "--data", "c=/c:5", "--saving.allow-missing", "x"]
        found = parse(Config, args)
        assert (found.data, found.saving.allow_missing) == (("c=/c:5",), ("x",))
        path.write_text("data = 3\n")
        with pytest.raises(ConfigError, match="data = 3 must be"):
            load_toml(Config, path)
        path.write_text("data = [3]\n")
        with pytest.raises(ConfigError, match="--data 3: must be a path, or NAME=PATH:WEIGHT"):
            load_toml(Config, path)
        path.write_text('data = ["/a", "/b"]\n')
        with pytest.raises(ConfigError, match=r"run\.toml: --data /a: several"):
            load_toml(Config, path)


class TestResolve:
    def test_every_path_becomes_absolute(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
        found = resolve(Config(storage="/s", data=("a=x/../y:2", "b=~/z:3")))
        assert found.data == (f"a={tmp_path}/y:2", f"b={Path.home()}/z:3")
        assert resolve(found) == found
        assert resolve(Config(storage="/s", data="./y=1")).data == (f"{tmp_path}/y=1",)
        [default] = resolve(Config(storage="/s")).data
        assert default.startswith(f"{Path.home()}/ray_ckpt/data/stdlib-")

    @pytest.mark.parametrize("value", ["s3://bucket/x", "a=s3://bucket/x:1"])
    def test_what_is_no_folder_is_refused(self, value):
        with pytest.raises(ConfigError, match="--data s3://bucket/x: only folders"):
            resolve(Config(storage="/s", data=value))

    def test_a_job_needs_absolute_paths(self, monkeypatch):
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
        with pytest.raises(ConfigError, match="--data x: a relative path"):
            resolve(Config(storage="/s", data="a=x:1"))


class TestFit:
    def test_one_source_named_or_not_is_trained_in_its_plain_order(self, tmp_path):
        path = make_data(tmp_path / "a", 23)
        plain = global_order(config_of(tmp_path, path))
        named = global_order(config_of(tmp_path, f"web={path}:7"))
        assert isinstance(named, GlobalOrder)
        assert named.rows_at(np.arange(60)).tolist() == plain.rows_at(np.arange(60)).tolist()

    def test_rows_of_another_length_are_refused_by_name(self, tmp_path):
        a, b = make_data(tmp_path / "a", 9), make_data(tmp_path / "b", 9, seq_len=3)
        with pytest.raises(
            DataError, match=r"--data code: .*/b has 3 tokens in a row, web .*has 4"
        ):
            check_run(config_of(tmp_path, f"web={a}:1", f"code={b}:1"), {})
        c = make_data(tmp_path / "c", 9)
        with pytest.raises(ConfigError, match=r"--seq-len 5: the rows in .*/a and .*/c have 4"):
            check_run(config_of(tmp_path, f"web={a}:1", f"code={c}:1", seq_len=5), {})

    def test_another_vocabulary_or_tokenizer_is_refused_where_it_is_known(self, tmp_path):
        a = make_data(tmp_path / "a", 9)
        b = make_data(tmp_path / "b", 9, vocab_size=257, tokenizer="byte")
        c = make_data(tmp_path / "c", 9, vocab_size=257, tokenizer="mine:12")
        d = make_data(tmp_path / "d", 9, vocab_size=300)
        found = load_data(parse_sources([f"a={a}:1", f"b={b}:1"]))
        assert isinstance(found, MixedIndex)
        assert (found.vocab_size, found.seq_len, found.num_rows) == (257, 4, 18)
        with pytest.raises(DataError, match=r"--data c: .* mine:12 as its tokenizer, b .* byte"):
            load_data(parse_sources([f"a={a}:1", f"b={b}:1", f"c={c}:1"]))
        with pytest.raises(DataError, match=r"--data d: .* 300 tokens in its vocabulary, b"):
            load_data(parse_sources([f"a={a}:1", f"b={b}:1", f"d={d}:1"]))

    def test_a_folder_that_is_missing_is_named(self, tmp_path):
        a = make_data(tmp_path / "a", 9)
        with pytest.raises(DataError, match="/nowhere does not exist"):
            check_run(config_of(tmp_path, f"a={a}:1", "b=/nowhere:1"), {})
        with pytest.raises(ConfigError, match="no folder is named"):
            load_data(())

    def test_sources_of_other_types_are_trained_as_one(self, tmp_path):
        paths = [
            make_data(tmp_path / "a", 9),
            make_data(tmp_path / "b", 9, pa.list_(pa.int32()), first=70000),
            make_data(tmp_path / "c", 9, pa.large_list(pa.uint8()), first=100),
        ]
        config = config_of(tmp_path, *(f"s{i}={path}:1" for i, path in enumerate(paths)))
        index, order = load_data(config.sources), global_order(config)
        assert index.dtype == "int32"
        plan = BatchPlan(global_batch=6, micro_batch=2, world_size=1, rank=0)
        kinds = set()

        def seen(table: pa.Table) -> pa.Table:
            kinds.add(table.schema)
            return table

        feed = LocalFeed(index=index, order=order, plan=plan, transform=seen)
        [step] = feed.steps(0, 1)
        rows = np.concatenate([micro.rows for micro in step])
        first = np.array([0, 70000, 100])[rows >> 48]
        tokens = np.concatenate([micro.tokens for micro in step])
        assert np.array_equal(tokens, np.repeat(first + (rows & 0xFFFF), 4).reshape(6, 4))
        assert len(kinds) == 1


class TestIdentity:
    @pytest.fixture
    def paths(self, tmp_path):
        return {name: make_data(tmp_path / name, 9, first=i) for i, name in enumerate("abc")}

    def test_names_weights_order_and_content_stay_the_same(self, tmp_path, paths):
        a, b, c = paths.values()
        config = config_of(tmp_path, f"a={a}:2", f"b={b}:1")
        facts = check_run(config, {})
        assert check_run(config, {}) == facts
        others = [
            (f"a={a}:3", f"b={b}:1"),
            (f"x={a}:2", f"b={b}:1"),
            (f"b={b}:1", f"a={a}:2"),
            (f"a={a}:2", f"b={c}:1"),
            (f"a={a}:2", f"b={b}:1", f"c={c}:1"),
            (a,),
        ]
        for data in others:
            with pytest.raises(ConfigError, match=r"other options: --data \(fingerprint"):
                check_run(replace(config, data=data), {})
            other = check_run(replace(config, data=data, run=f"other{others.index(data)}"), {})
            assert other.data_fingerprint != facts.data_fingerprint
            assert other.config_fingerprint != facts.config_fingerprint
        moved = (tmp_path / "a").rename(tmp_path / "elsewhere")
        assert check_run(replace(config, data=(f"a={moved}:2", f"b={b}:1")), {}) == facts

    def test_a_run_of_one_source_keeps_its_identity(self, tmp_path, paths):
        facts = check_run(config_of(tmp_path, paths["a"]), {})
        assert facts.data_fingerprint == load_index(paths["a"]).fingerprint
        assert check_run(config_of(tmp_path, f"web={paths['a']}:7"), {}) == facts
        with pytest.raises(ConfigError, match="other options: --data"):
            check_run(config_of(tmp_path, f"a={paths['a']}:1", f"b={paths['b']}:1"), {})


def test_a_run_says_what_it_is_trained_on(tmp_path):
    a, b = make_data(tmp_path / "a", 31), make_data(tmp_path / "b", 10)
    reading = ReadingConfig(feed="local")
    plain = config_of(tmp_path, a, reading=reading)
    assert trainer._opening(plain, None).splitlines()[1] == (
        f"data {a}: 31 rows, 5 steps an epoch, 1 rows left out of each"
    )
    mixed = config_of(tmp_path, f"web={a}:3", f"code={b}:1", reading=reading)
    assert isinstance(global_order(mixed), MixedOrder)
    assert trainer._opening(mixed, None).splitlines()[1:4] == [
        "data: 2 sources, mixed in every 4 rows",
        f"  web {a}: 31 rows, 75.00% of the samples, 6.7 steps an epoch, 1 rows left out of each",
        f"  code {b}: 10 rows, 25.00% of the samples, 6.0 steps an epoch, 1 rows left out of each",
    ]
