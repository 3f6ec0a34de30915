"""The id that W&B knows a run by comes from a file that anybody may have written."""

import pytest

from stability.tracking.wandb_run import start_run


@pytest.mark.parametrize(
    "said", [b"", b"*", b"kept/../../../..", b"..", b"a\nb", b"\xff", b"\x1b[2J", b"x" * 65]
)
def test_an_id_that_is_none_deletes_no_folder_and_starts_no_run(tmp_path, monkeypatch, said):
    """Such an id stands in the pattern of folders that an offline run deletes."""
    monkeypatch.setattr("wandb.init", lambda **_: pytest.fail("W&B was called"))
    directory = tmp_path / "study" / "arm" / "wandb"
    for kept in ("offline-run-1-kept", "offline-run-2-x"):
        (directory / kept).mkdir(parents=True)
    (directory / "id.txt").write_bytes(said)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"id\.txt: must hold the id of a W&B run") as caught:
        start_run("offline", directory, tags=[])
    assert str(caught.value).isprintable()
    assert sorted(tmp_path.rglob("*")) == before
