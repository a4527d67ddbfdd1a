"""Errors of packages that are missing, or do not fit, while an integration is imported."""

import pytest

from sigattn.optional import MissingPackageError, explain_import_errors


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ModuleNotFoundError("no module", name="transformers"),
            r"^this needs transformers: pip install 'sigattn\[x\]'$",
        ),
        # what pip installs next to a PyTorch for CPUs
        (RuntimeError("operator torchvision::nms does not exist"), "torchvision .* cannot be imported next to torch"),
        (ImportError("cannot import name"), r"^cannot import name \(installed by pip install 'sigattn\[x\]'\)$"),
    ],
)
def test_the_package_to_install_is_named(error, message):
    with pytest.raises(MissingPackageError, match=message), explain_import_errors("x"):
        raise ImportError("Failed to import transformers.models") from error  # as transformers hides its cause
