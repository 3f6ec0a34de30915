"""What is secret in a command is masked, what is none is not, and twice is as once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stability.config.commands import call_training, command_training
from stability.config.flags import parse_flags
from stability.config.masking import (
    MASKED,
    has_masked,
    is_secret,
    masked_text,
    masked_values,
    masked_words,
    secrets_in,
    without_secrets,
)

SECRET = ["api-key", "--api_key", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "hub_token", "MY_TOKEN"]
OPEN = ["pad-token", "eos_token_id", "max-tokens", "max-token", "initializer_token", "key-heads"]
values = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=6, max_size=20)


@pytest.mark.parametrize("name", SECRET)
def test_a_password_is_told_by_its_name(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", OPEN)
def test_what_only_sounds_like_one_is_none(name: str) -> None:
    assert not is_secret(name)


@given(values, st.sampled_from(["--{}", "{}"]), st.sampled_from(["api-key", "hub_token", "passwd"]))
def test_in_each_form_that_a_flag_takes(value: str, form: str, name: str) -> None:
    flag = form.format(name)
    forms = [[f"{flag}={value}"], ["bash", "-c", f"python t.py {flag}={value} --lr 1"]]
    if flag.startswith("-"):
        forms += [[flag, value], ["sh", "-c", f"train {flag} {value} and more"]]
    for words in forms:
        found = masked_words(["python", "t.py", *words, "--lr", "0.1"])
        named = [word.removeprefix(f"{flag}=") for word in found if word.startswith(f"{flag}=")]
        assert all(word.startswith(MASKED) for word in named)
        assert not any(value in word for word in found if not word.startswith(flag))
        assert MASKED in " ".join(found)
        assert found[-2:] == ["--lr", "0.1"]
        assert masked_words(found) == found
        assert has_masked({"command": found})
        assert len(found) == len(words) + 4


@given(st.lists(st.text(max_size=12), max_size=6))
def test_masking_is_done_once_and_keeps_the_words_places(words: list[str]) -> None:
    found = masked_words(words)
    assert len(found) == len(words)
    assert masked_words(found) == found
    assert parse_flags(found).keys() == parse_flags(words).keys()


@given(values, values)
def test_two_keys_are_told_apart_and_one_is_itself(one: str, other: str) -> None:
    masked = [command_training(["t", "--token", x], {"A_TOKEN": x}) for x in (one, other)]
    assert (masked[0] == masked[1]) == (one == other)
    assert masked_values(masked[0]) == masked[0]


def test_a_password_in_an_address_is_masked_wherever_it_stands() -> None:
    training = command_training(["t.py", "--db", "pg://me:hunter2@host/x"], {"URL": "a://b:c9@d"})
    assert "hunter2" not in str(training)
    assert "c9" not in str(training)
    assert training["flags"]["db"].startswith("pg://masked:")
    assert training["flags"]["db"].endswith("@host/x")
    for address in ("https://host:8080/a@b", "https://host/a:b", "me@host"):
        assert masked_text(address) == address
    for address in (
        "https://hunter2@host/x",
        "https://hunter2:x@host",
        "https://h?token=hunter2&a=1",
    ):
        assert "hunter2" not in masked_text(address)


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "hunter2=="],  # as of base64
        ["--set=wandb.api_key=hunter2", "--lr", "1"],
        ["bash", "-c", "export A=1;HF_TOKEN=hunter2 python t.py"],
        ["--extra", '{"api_key": "hunter2", "a": 1}'],
        ["--credentials", '{"private_key": "hunter2"}'],
        ["a=1,api_key=hunter2"],
        ["uv", "run", "--token", "hunter2", "train.py"],
        ["bash", "-c", "HF_TOKEN=hunter2 python t.py --lr 1"],
        ["--logger.init_args.token=hunter2"],
        ["--model_kwargs.token", "hunter2", "configs/a.yaml"],
        ["--secrets.openai", "hunter2"],
        ["srun", "--export", "ALL,HF_TOKEN=hunter2,X=1"],
        ["--use_auth_token", "--token", "hunter2"],
        ["--wandb_key", "hunter2"],
        ["--api-key", "-Ahunter2xyz"],
        ["--header", "Authorization: Bearer hunter2.abcdefgh"],
    ],
)
def test_wherever_it_stands(words: list[str]) -> None:
    found = masked_words(words)
    assert "hunter2" not in " ".join(found)
    assert MASKED in " ".join(found)
    assert masked_words(found) == found
    assert "hunter2" not in str(command_training(["python", "t.py", *words], {}))
    assert {x for x in words if x in ("train.py", "--lr", "1", "run")} <= set(found)
    secrets = secrets_in(words, {"HF_TOKEN": "of the shell"})
    assert any("hunter2" in each for each in secrets)
    assert "of the shell" in secrets
    for secret in secrets:
        assert secret not in without_secrets(f"401 for {secret}!", words, {"A_TOKEN": secret})
    training = command_training(["python", "t.py", *words], {"HF_TOKEN": "hunter2"})
    assert masked_values(training) == training


@pytest.mark.parametrize(
    "words",
    [
        ["--use_auth_token", "--lr", "0.1"],
        ["--use_auth_token", "{flags}"],
        ["--secret", "{seed}"],
        ["--use_auth_token", "True"],
        ["data.token=5"],
        ["EOS_TOKEN=</s>", "MAX_TOKEN=4096"],
        ["--user_token", "<|user|>"],
        ["pip", "install", "git+ssh://git@github.com/a/b"],
        ["hdfs://user@node:9000/a"],
    ],
)
def test_what_is_no_secret_stays(words: list[str]) -> None:
    assert masked_words(words) == words
    assert masked_text(" ".join(words)) == " ".join(words)


def test_a_message_is_masked_once_and_short_values_stay_in_it() -> None:
    words = ["--token", "abcdef", "--api_key", "abcdefghi", "--secret", "e"]
    said = without_secrets("401 for abcdefghi at step 3, abcdef", words, {})
    assert "abc" not in said
    assert "at step 3" in said
    assert said.count(MASKED) == 2


def test_what_is_below_a_secret_name_and_a_number_are_masked() -> None:
    values = {"secrets": {"hf": "hunter2"}, "secrets.hf": "hunter2", "password": 1234567}
    found = masked_values({"config": values, "eos_token": "</s>", "seed": 1, "api_key": None})
    assert "hunter2" not in str(found)
    assert "1234567" not in str(found)
    assert found["eos_token"] == "</s>"
    assert (found["seed"], found["api_key"]) == (1, None)


def test_what_a_call_is_told_is_masked_as_well() -> None:
    config = {"hub": {"token": "hunter2", "steps": 3}, "eos_token": "</s>"}
    assert call_training(config, ["t.py"])["config"]["eos_token"] == "</s>"
    assert "hunter2" not in str(call_training(config, ["t.py"]))
    assert "hunter2" not in str(call_training(None, ["t.py", "--hub.token", "hunter2"]))


def test_a_question_and_a_placeholder_stay_as_they_are() -> None:
    question = "Does the token matter?"
    assert masked_values({"question": question, "token": "{seed}"}) == {
        "question": question,
        "token": "{seed}",
    }
