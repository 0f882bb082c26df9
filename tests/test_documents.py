"""The documents: their links."""

import re

from conftest import REPO


def test_every_relative_link_leads_to_a_file():
    documents = [path for path in REPO.rglob("*.md") if not {".venv", ".git", "data"} & set(path.parts)]
    links = [(path, link) for path in documents for link in re.findall(r"\]\(([^)#\s]+)", path.read_text())]
    relative = [(path, link) for path, link in links if "://" not in link]
    assert len(relative) > 40
    assert [(path.name, link) for path, link in relative if not (path.parent / link).exists()] == []
