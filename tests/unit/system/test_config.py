import os
import pathlib
import reprlib
import tomllib

import pytest

from ckptd.shared.base.errors import ConfigError
from ckptd.system import config
from ckptd.system.config import SETTINGS, Config, load_config


@pytest.fixture(autouse=True)
def no_machine_file(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "SYSTEM_TOML", str(tmp_path / "etc.toml"))


def load(flags=None, toml_path=None, home="/nonexistent", **environ):
    return load_config(flags or {}, {"HOME": home, **environ}, toml_path)


def toml(tmp_path, text, name="config.toml"):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_defaults():
    loaded, sources = load()
    assert loaded == Config()
    assert loaded.arena == f"/dev/shm/ckptd-{os.getuid()}"
    assert loaded.store is None
    assert set(sources) == set(SETTINGS)
    assert set(sources.values()) == {"default"}


def test_flags_over_environment_over_toml(tmp_path):
    path = toml(tmp_path, 'keep_last = 5\nslots_per_rank = 4\nworker_nice = 7\nstore = "/pfs"\n')
    loaded, sources = load({"keep_last": 9, "hash_threads": None}, path, CKPTD_SLOTS_PER_RANK="2", CKPTD_KEEP_LAST="8")
    assert (loaded.keep_last, loaded.slots_per_rank, loaded.worker_nice, loaded.store) == (9, 2, 7, "/pfs")
    assert sources["keep_last"] == "--keep-last"
    assert sources["slots_per_rank"] == "CKPTD_SLOTS_PER_RANK"
    assert sources["worker_nice"] == path
    assert sources["hash_threads"] == "default"


@pytest.mark.parametrize("raw", ["64G", "64GiB", "68719476736", 64 << 30])
def test_sizes_everywhere(raw, tmp_path):
    assert load({"budget_nbytes": raw})[0].budget_nbytes == 64 << 30
    assert load(CKPTD_BUDGET_NBYTES=str(raw))[0].budget_nbytes == 64 << 30
    quoted = f'"{raw}"' if isinstance(raw, str) else raw
    assert load(toml_path=toml(tmp_path, f"budget_nbytes = {quoted}"))[0].budget_nbytes == 64 << 30


def test_a_bandwidth_is_a_size_per_second():
    assert load(CKPTD_DRAIN_BANDWIDTH="500M/s")[0].drain_bandwidth == 500 << 20


@pytest.mark.parametrize("raw", ["24h", "1d", "86400", 86400, 86400.0])
def test_durations(raw):
    assert load({"orphan_ttl_s": raw})[0].orphan_ttl_s == 86400.0
    assert isinstance(load({"orphan_ttl_s": raw})[0].orphan_ttl_s, float)


@pytest.mark.parametrize(("raw", "value"), [("yes", True), ("1", True), ("ON", True), ("false", False), (True, True)])
def test_switches(raw, value):
    assert load({"exit_when_empty": raw})[0].exit_when_empty is value


def test_paths_and_choices():
    loaded, _ = load(CKPTD_STORE="~/store", CKPTD_LOG_LEVEL="DEBUG")
    assert loaded.store == os.path.expanduser("~/store")
    assert loaded.log_level == "debug"


def test_texts_keep_their_case_and_may_be_empty():
    loaded, _ = load({"domain": ""}, CKPTD_NODE="Gpu-17.Rack", CKPTD_PEER_ADDRESS="ib0", CKPTD_DOMAIN="Rack 3")
    assert (loaded.node, loaded.peer_address, loaded.domain) == ("Gpu-17.Rack", "ib0", "")
    assert load(CKPTD_REDUNDANCY="Double")[0].redundancy == "double"


def test_an_empty_variable_is_not_set():
    assert load(CKPTD_STORE="", CKPTD_KEEP_LAST="") == load()


def test_an_empty_flag_takes_the_store_away():
    assert load({"store": ""}, CKPTD_STORE="/pfs")[0].store is None


@pytest.mark.parametrize(
    ("flags", "environ", "near"),
    [
        ({"keep_lst": 1}, {}, "keep_last"),
        ({}, {"CKPTD_SLOT_PER_RANK": "3"}, "CKPTD_SLOTS_PER_RANK"),
        ({}, {"CKPTD_STOR": "/x"}, "CKPTD_STORE"),
    ],
)
def test_unknown_names_get_a_suggestion(flags, environ, near):
    with pytest.raises(ConfigError, match="unknown setting") as caught:
        load(flags, **environ)
    assert caught.value.hint == f"did you mean {near}?"


def test_unknown_keys_of_a_file_name_the_file(tmp_path):
    path = toml(tmp_path, "zzz = 1")
    with pytest.raises(ConfigError, match=r"config\.toml") as caught:
        load(toml_path=path)
    assert "known: arena" in caught.value.hint


def test_variables_of_others_are_left_alone():
    assert load(**dict.fromkeys(config.FOREIGN_VARIABLES - {"CKPTD_CONFIG"}, "x"), PATH="/bin") == load()


@pytest.mark.parametrize(
    ("name", "raw", "allowed"),
    [
        ("slots_per_rank", "1", "a whole number, at least 2, at most 64"),
        ("slots_per_rank", "2.5", "a whole number"),
        ("slots_per_rank", True, "a whole number"),
        ("budget_nbytes", "much", 'such as "64G"'),
        ("budget_nbytes", -1, "at least 0"),
        ("stage_timeout_s", "0", "above 0"),
        ("stage_timeout_s", "soon", 'such as "90s"'),
        ("exit_when_empty", "maybe", "true or false"),
        ("log_level", "loud", "one of debug, info, warning, error"),
        ("store", "/a\nb", "a path of fewer than 1024 characters"),
        ("arena", "", "a path"),
        ("worker_nice", 20, "at most 19"),
        ("keep_last", [3], "a whole number"),
        ("node", "../x", "letters, digits and . _ -"),
        ("node", "-x", "letters, digits and . _ -"),
        ("node", "n" * 256, "at most 255"),
        ("domain", "d" * 256, "at most 255 characters"),
        ("peer_address", "a b", "an interface such as ib0"),
        ("peer_port", "65536", "at most 65535"),
        ("peer_timeout_s", "0", "above 0"),
        ("redundancy", "raid", "one of none, xor, double"),
        ("set_size", "1", "at least 2, at most 64"),
        ("key_file", "a\tb", "a path of fewer than 1024 characters"),
    ],
)
def test_bad_values_say_key_value_origin_and_what_is_allowed(name, raw, allowed):
    with pytest.raises(ConfigError) as caught:
        load({name: raw})
    said = f"{name}={reprlib.repr(raw)} (from {SETTINGS[name].flag}) is not allowed: it must be "
    assert caught.value.message.startswith(said)
    assert allowed in caught.value.message.removeprefix(said)


@pytest.mark.parametrize("name", [name for name in SETTINGS if SETTINGS[name].kind != "switch"])
def test_what_the_hint_of_a_bad_value_types_is_allowed_there(name, tmp_path):
    setting, bad = SETTINGS[name], "\x01" * 300
    path = tmp_path / "c.toml"
    path.write_text(f"{name} = []")
    for flags, environ, start, end in (
        ({name: bad}, {}, f"{setting.flag} ", ""),
        ({}, {setting.variable: bad}, f"{setting.variable}=", ""),
        ({}, {}, f"{name} = ", f" in {path}"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(flags, environ, None if flags or environ else str(path))
        hint = caught.value.hint
        assert hint.startswith(start), hint
        assert hint.endswith(end), hint
        typed = hint.removeprefix(start).removesuffix(end)
        setting.parse(tomllib.loads(f"it = {typed}")["it"] if end else typed)


def test_a_path_begins_where_the_process_works_or_at_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ann")
    for raw, found in (("ckpt", f"{tmp_path}/ckpt"), ("./a/../b/", f"{tmp_path}/b"), ("~/ckpt", "/home/ann/ckpt")):
        assert load({"store": raw})[0].store == load(CKPTD_STORE=raw)[0].store == found
    assert load(toml_path=toml(tmp_path, 'store = "~/ckpt"'))[0].store == "/home/ann/ckpt"


def test_a_relative_path_is_refused_in_a_file_and_in_the_root_directory(tmp_path, monkeypatch):
    path = toml(tmp_path, 'key_file = "keys/mine"')
    with pytest.raises(
        ConfigError, match=f"{path}.* is not allowed: it must be an absolute path, or .* ~/: a file"
    ) as e:
        load(toml_path=path)
    assert e.value.hint == f'key_file = "/path/of/key_file" in {path}'
    monkeypatch.chdir("/")
    with pytest.raises(ConfigError, match=r"CKPTD_STORE\) is not allowed.*the working directory is /") as caught:
        load(CKPTD_STORE="ckpt")
    assert caught.value.hint == "CKPTD_STORE=/path/of/store"
    assert load(CKPTD_STORE="/ckpt")[0].store == "/ckpt"


def test_a_home_directory_that_is_not_there_is_no_directory_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no home directory ~nobody-here"):
        load({"store": "~nobody-here/ckpt"})
    assert load({"store": "./~nobody-here/ckpt"})[0].store == f"{tmp_path}/~nobody-here/ckpt"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="the working directory of this process was removed"):
        load({"store": "ckpt"})


def test_where_the_file_is_looked_for(tmp_path):
    assert config.default_toml_path({"HOME": str(tmp_path)}) is None
    machine = toml(tmp_path, "keep_last = 4", "etc.toml")
    assert config.default_toml_path({"HOME": str(tmp_path)}) == machine
    own = toml(tmp_path, "keep_last = 5", ".config/ckptd/config.toml")
    assert config.default_toml_path({"HOME": str(tmp_path)}) == own
    assert load(home=str(tmp_path))[0].keep_last == 5
    named = toml(tmp_path, "keep_last = 6", "named.toml")
    assert load(home=str(tmp_path), CKPTD_CONFIG=named)[0].keep_last == 6


def test_a_named_file_that_is_missing_or_broken(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load(CKPTD_CONFIG=str(tmp_path / "missing.toml"))
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(toml_path=toml(tmp_path, "keep_last ="))


def test_every_setting_says_what_it_does():
    for setting in SETTINGS.values():
        assert setting.help
        assert setting.allowed
        assert setting.variable not in config.FOREIGN_VARIABLES
    assert SETTINGS["log_level"].choices == ("debug", "info", "warning", "error")


def test_double_parity_has_smaller_sets():
    with pytest.raises(ConfigError, match=r"set_size = 17 .from --set-size. is too large for redundancy = double"):
        load_config({"redundancy": "double", "set_size": 17}, {})
    assert load_config({"redundancy": "double", "set_size": 16}, {})[0].set_size == 16
    assert load_config({"redundancy": "xor", "set_size": 64}, {})[0].set_size == 64


def test_the_page_of_settings_has_each():
    page = (pathlib.Path(__file__).parents[3] / "docs/settings.md").read_text()
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert [one for one in Config.__struct_fields__ if f"`{one}`" not in rows] == []
