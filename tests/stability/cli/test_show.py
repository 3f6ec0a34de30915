"""`stability show` hides no run that is on disk."""

from stability.cli.main import main
from stability.records.sealed_json import read_sealed, write_sealed
from tests.stability.report.synthetic import write_synthetic


def test_runs_of_an_arm_that_the_study_does_not_list_are_told(tmp_path, capsys):
    """As those of a recorded arm that has failed."""
    write_synthetic(tmp_path)
    assert main(["show", str(tmp_path)]) == 0
    assert "On disk" not in capsys.readouterr().out
    content = read_sealed(tmp_path / "study.json", "")
    (_, *kept), gone = content["arms"][1:], content["arms"][1]["name"]
    content["arms"] = [content["arms"][0], *kept]
    write_sealed(tmp_path / "study.json", content)
    assert main(["show", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"note: On disk, but not in the study: {gone} (seed" in said
