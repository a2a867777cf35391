"""The pages: their commands work, and the runner that says so can fail."""

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from delta_weight_sync.cli import COMMANDS
from delta_weight_sync.vllm.server import Settings as Follows
from docs.run import PageError, blocks, check, pages
from docs.stage import ROOT, Stage
from env_space.settings import Settings as Game
from inference_space.settings import Settings as Space
from trainer.demo.processes import free_port
from trainer.settings import Settings as Trainer


def page(folder: Path, text: str) -> list:
    path = folder / "page.md"
    path.write_text(text)
    return blocks(path, "page.md")


def checked(folder: Path, text: str, *, quick: bool = True):
    return check([page(folder, text)], Stage(folder, dict(os.environ)), quick=quick)


def test_a_command_that_fails_is_named_with_its_output(tmp_path, capsys):
    report = checked(tmp_path, "```bash\necho why >&2\nfalse\necho never\n```\n```bash\ntrue\n```\n")
    assert [block.place for block in report.failed] == ["page.md:1"]
    assert [block.line for block in report.passed] == [6], "the others are still checked"
    printed = capsys.readouterr().out
    assert "why" in printed
    assert "exit code 1" in printed
    assert "FAILED: page.md:1" in report.summary()


@pytest.mark.parametrize(
    ("shown", "same"), [("a 1\nb", True), ("a …\nb", True), ("a 2\nb", False), ("a 1", False)]
)
def test_output_that_a_page_shows_is_compared(tmp_path, shown, same):
    text = f"<!-- docs-check: shows -->\n```bash\nprintf 'a 1\\nb\\n'\n```\n\n```text\n{shown}\n```\n"
    assert bool(checked(tmp_path, text).passed) == same


def test_a_background_block_serves_the_rest_of_its_page_and_then_ends(tmp_path):
    text = """
<!-- docs-check: background until http://127.0.0.1:{port}/ -->
```bash
echo $$ > pid; exec {python} -m http.server {port} --bind 127.0.0.1
```
```bash
{python} -c "import urllib.request as r; r.build_opener(r.ProxyHandler({{}})).open('http://127.0.0.1:{port}/')"
```
"""
    report = checked(tmp_path, text.format(port=free_port(), python=sys.executable))
    assert len(report.passed) == 2
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_a_background_block_that_dies_has_failed(tmp_path):
    text = "<!-- docs-check: background until http://127.0.0.1:1/ -->\n```bash\necho gone; exit 3\n```\n"
    assert checked(tmp_path, text).failed


def test_what_is_not_run_is_listed_with_its_reason(tmp_path):
    text = (
        "<!-- docs-check: not run, it needs a GPU -->\n```bash\nfalse\n```\n"
        "<!-- docs-check: slow -->\n```bash\ntouch slow\n```\n"
    )
    quick = checked(tmp_path, text)
    assert [reason for _, reason in quick.left_out] == ["it needs a GPU", "it is slow"]
    assert "not run: page.md:2, it needs a GPU" in quick.summary()
    assert len(checked(tmp_path, text, quick=False).passed) == 1
    assert (tmp_path / "slow").exists()


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("```sh\nls\n```\n", "write ```bash"),
        ("<!-- docs-check: perhaps -->\n```bash\nls\n```\n", "does not know 'perhaps'"),
        ("<!-- docs-check: shows -->\n```bash\nls\n```\n", "shows nothing"),
    ],
)
def test_a_page_that_would_not_be_checked_is_refused(tmp_path, text, fix):
    with pytest.raises(PageError, match=fix):
        page(tmp_path, text)


def test_every_command_of_the_pages_says_how_it_is_checked():
    assert len([block for path, name in pages() for block in blocks(path, name)]) > 40


@pytest.mark.full
def test_messages_of_the_troubleshooting_page_are_what_programs_say():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    sentences = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    assert len(sentences) > 25
    said = "\n".join(_strings())
    for sentence in sentences:
        parts = [re.escape(part) for part in sentence.split("…")]
        assert re.search("[^\n]*".join(parts), said), f"no program says {sentence!r}"


def _strings() -> Iterator[str]:
    """Every string of the programs in a line of its own, with … for what is put into it."""
    for app in ("shared", "trainer", "inference_space", "env_space"):
        for path in (ROOT / app).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value.replace("\n", " ")


def test_links_between_pages_lead_somewhere():
    for path, name in pages():
        for target in re.findall(r"\]\((?!https?://)([^)#]+)[^)]*\)|srcset=\"([^\"]+)\"", path.read_text()):
            link = next(filter(None, target))
            assert (path.parent / link).exists(), f"{name} links to {link}"


TEXTS = [*(name for _, name in pages()), "CONTRIBUTING.md", "SECURITY.md", "inference_space/README.md"]


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_a_page_names_are_there(name):
    tops = "shared|trainer|inference_space|env_space|bench|docs|tests|upstream"
    for path in re.findall(rf"`((?:{tops})/[\w./-]+)`", (ROOT / name).read_text()):
        assert (ROOT / path).exists(), f"{name} names {path}"


def test_proofs_that_contributing_names_are_there():
    table = (ROOT / "CONTRIBUTING.md").read_text().split("## The slow proofs")[1].split("\n## ")[0]
    proofs = set(re.findall(r"\btest_\w+", table))
    assert len(proofs) > 15
    assert proofs <= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize(("prefix", "settings"), [("REPLICA_", Space), ("DELTA_WEIGHT_SYNC_", Follows)])
@pytest.mark.parametrize("name", TEXTS)
def test_variables_that_a_page_names_are_read(name, prefix, settings):
    known = {prefix + field.upper() for field in settings.model_fields}
    named = set(re.findall(rf"\b{prefix}[A-Z_]+\b", (ROOT / name).read_text()))
    assert named <= known, f"{name} names {named - known}"


@pytest.mark.parametrize(
    ("prefix", "settings"),
    [("DELTA_WEIGHT_SYNC_", Follows), ("REPLICA_", Space), ("WORDLE_", Game), ("", Trainer)],
)
def test_every_setting_is_on_the_page_of_settings_with_its_default(prefix, settings):
    page = (ROOT / "docs" / "settings.md").read_text()
    shown = dict(re.findall(r"^\| `(\w+)` \| (.*?) ?\|", page, re.MULTILINE))
    for name, field in inspect.signature(settings).parameters.items():
        row = shown.get(f"{prefix}{name.upper()}" if prefix else name)
        assert row is not None, f"docs/settings.md has no {prefix}{name}"
        default = field.default
        if default and isinstance(default, str | int | float) and "\n" not in str(default):
            assert row in (str(default), f"{default:g}" if isinstance(default, float) else ""), (
                f"the default of {name} is {default}, not {row}"
            )


def test_the_objects_of_the_kubernetes_page_use_known_variables_and_options():
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    objects = {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(text)}
    apps = {"DELTA_WEIGHT_SYNC_": Follows, "REPLICA_": Space, "WORDLE_": Game}
    known = {prefix + field.upper() for prefix, settings in apps.items() for field in settings.model_fields}
    assert {*re.findall(r"\b[A-Z]+_[A-Z_]+\b|SPACES", text)} <= known | {"HF_TOKEN", "SPACE_KEY", "SPACES"}
    options = {*re.findall(r"--(\w+)", text)} - {*inspect.signature(Trainer).parameters}
    assert options == {"config", "output_dir"}  # of TRL
    assert "trainer" not in str(objects["StatefulSet", "replica"]["spec"]["template"]["spec"])


@pytest.mark.parametrize("name", TEXTS)
def test_words_of_the_console_command_that_a_page_names_are_known(name):
    named = set(re.findall(r"\bdelta-weight-sync ([a-z]\w*)", (ROOT / name).read_text()))
    assert named <= {*COMMANDS}, f"{name} names {named - {*COMMANDS}}"


@pytest.mark.long
def test_every_quick_command_of_the_pages_works():
    """`make docs-check` runs the slow ones too."""
    command = [sys.executable, "-m", "docs.run", "--quick"]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=3600)
    assert result.returncode == 0, result.stdout
