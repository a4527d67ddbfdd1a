import pytest

from sigattn.conversion import api


@pytest.fixture
def without_query_term(monkeypatch):
    """Convert with c + a · log(visible keys) only."""
    fit = api.fit_biases
    monkeypatch.setattr(api, "fit_biases", lambda *a: {name: of[:1] for name, of in fit(*a).items()})
