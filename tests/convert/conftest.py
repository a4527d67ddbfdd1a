import pytest

from sigattn.convert import conversion


@pytest.fixture
def without_query_term(monkeypatch):
    """Convert with c + a · log(visible keys) only."""
    fit = conversion.fit_biases
    monkeypatch.setattr(conversion, "fit_biases", lambda *a: {name: of[:1] for name, of in fit(*a).items()})
