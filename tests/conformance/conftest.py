"""One thread, and files of norms."""

import pytest


@pytest.fixture(autouse=True)
def one_thread(with_threads):
    with with_threads(1):
        yield


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def file(name, text):
        path = tmp_path / name
        path.write_text("import torch\n" + text)
        return path

    return file
