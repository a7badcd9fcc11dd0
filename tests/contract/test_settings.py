"""Settings: file, environment and command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.settings import PREFIX, Settings, child_arguments, conf_dir, leaves, load_settings


def test_the_file_says_what_the_dataclasses_say() -> None:
    assert load_settings({}) == Settings()


def test_the_file_names_every_setting() -> None:
    text = (conf_dir() / "default.toml").read_text(encoding="utf-8")
    for key, _ in leaves(Settings()):
        name = key.rpartition(".")[2]
        assert re.search(rf"^(?:{name} = |\[.*\b{name}\])", text, re.MULTILINE), key


@pytest.mark.parametrize(("key", "default"), list(leaves(Settings())), ids=lambda value: str(value))
def test_each_setting_has_its_variable(key: str, default: Any) -> None:
    if not isinstance(default, dict):
        text = str(default).lower() if isinstance(default, bool) else str(default)
        name = key.replace(".", "__")
        found = dict(leaves(load_settings({f"{PREFIX}{name.replace('__', '_').upper()}": text or "x"})))
        assert found[key] == (default if text else "x")
        assert load_settings({}, **{name: None}) == Settings()


def test_the_environment_goes_before_the_file_and_the_command_line_before_both() -> None:
    environ = {"MILLRACE_SERVE_PORT": "9000", "MILLRACE_LAKE": "/a/b", "MILLRACE_COLLECT_BACKOFF_MAX_S": "2.5"}
    settings = load_settings(environ)
    assert (settings.serve.port, settings.lake, settings.collect.backoff_max_s) == (9000, Path("/a/b"), 2.5)
    settings = load_settings(environ, serve__port=1, lake=None)
    assert (settings.serve.port, settings.lake) == (1, Path("/a/b"))


def test_the_short_name_of_the_broker() -> None:
    assert load_settings({"MILLRACE_KAFKA": "h:1"}).kafka.bootstrap == "h:1"
    assert load_settings({"MILLRACE_KAFKA_BOOTSTRAP": "h:2"}).kafka.bootstrap == "h:2"
    assert load_settings({"MILLRACE_KAFKA": "h:1"}, kafka__bootstrap="h:3").kafka.bootstrap == "h:3"


def test_an_assignment_goes_before_the_environment() -> None:
    environ = {"MILLRACE_SERVE_PORT": "9000"}
    settings = load_settings(environ, ["serve.port=1", "kafka=h:1", "spark.rehearse=false"])
    assert (settings.serve.port, settings.kafka.bootstrap, settings.spark.rehearse) == (1, "h:1", False)
    for wrong in ("serve.port", "serve.prot=1"):
        with pytest.raises(ConfigError):
            load_settings(environ, [wrong])


@pytest.mark.parametrize("lake", ["/a", "s3://bucket/a"])
def test_a_child_gets_the_same_settings(monkeypatch: pytest.MonkeyPatch, lake: str) -> None:
    monkeypatch.setenv("MILLRACE_SERVE_PORT", "9000")
    settings = load_settings(lake=lake, kafka__bootstrap="h:1", collect__port=0, spark__rehearse=False)
    lake, pipeline, *rest = child_arguments(settings)[1::2]
    assert load_settings(lake=lake, pipeline=pipeline, assignments=rest) == settings
    assert "serve.port=9000" not in rest, "it is inherited"


@pytest.mark.parametrize(("text", "expected"), [("false", False), ("0", False), ("TRUE", True), ("1", True)])
def test_a_truth_value(text: str, expected: bool) -> None:
    assert load_settings({"MILLRACE_SPARK_REHEARSE": text}).spark.rehearse is expected


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({"MILLRACE_SERVE_PORT": "high"}, "MILLRACE_SERVE_PORT"),
        ({"MILLRACE_SERVE_PORT": "1.5"}, "MILLRACE_SERVE_PORT"),
        ({"MILLRACE_COLLECT_BACKOFF_MAX_S": "x"}, "MILLRACE_COLLECT_BACKOFF_MAX_S"),
        ({"MILLRACE_SPARK_REHEARSE": "perhaps"}, "MILLRACE_SPARK_REHEARSE"),
        ({"MILLRACE_SERVE_PROT": "1"}, "MILLRACE_SERVE_PROT"),
        ({"MILLRACE_NOTHING": "1"}, "MILLRACE_NOTHING"),
        ({"MILLRACE_SERVE": "1"}, "MILLRACE_SERVE"),
        ({"MILLRACE_LAKE_ROOT": "/x"}, "MILLRACE_LAKE_ROOT"),
        ({"MILLRACE_SPARK_CONF": "a=b"}, "MILLRACE_SPARK_CONF"),
    ],
)
def test_a_wrong_variable_is_named(environ: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(environ)
    assert caught.value.key == key


def test_variables_that_are_no_settings_are_passed_over() -> None:
    environ = {"MILLRACE_CRASH_AT": "x", "MILLRACE_JARS_DIR": "/x", "MILLRACE_PARENT": "1", "PATH": "/bin"}
    assert load_settings(environ) == Settings()


def test_the_pipeline_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    assert Settings().pipeline_folder() == conf_dir() / "pipelines" / "meetup"
    (tmp_path / "pipeline.toml").touch()
    assert Settings(pipeline=str(tmp_path)).pipeline_folder() == tmp_path
    with pytest.raises(ConfigError, match=r"Known: .*meetup"):
        Settings(pipeline="meatup").pipeline_folder()


def test_the_conf_folder_is_the_one_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_CONF", str(tmp_path))
    with pytest.raises(ConfigError, match=r"default\.toml"):
        conf_dir()
    (tmp_path / "default.toml").write_text("[serve]\nport = 1\n", encoding="utf-8")
    assert load_settings({}).serve.port == 1
    (tmp_path / "default.toml").write_text("[serve]\nprot = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"default\.toml:2: serve\.prot: unknown key\. Did you mean 'port'"):
        load_settings({})
