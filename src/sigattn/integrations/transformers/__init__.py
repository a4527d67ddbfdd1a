"""Sigmoid attention in Hugging Face's transformers: ``attn_implementation="sigmoid"``::

    import sigattn.integrations.transformers  # registers it

    model = AutoModelForCausalLM.from_config(config, attn_implementation="sigmoid")

The bias b is ``config.sigmoid_bias``: a number, or "log_visible", the default, -log of the number of keys that each
query sees, which is -log n in an encoder and does not change as a cache grows. The value of a composite model's
configuration holds for its sub-configurations that have none. A softmax model that ``sigattn.convert`` converted has a
learned bias in each layer instead, and ``config.sigmoid_bias`` lists them. With ``config.sigmoid_normalize = True`` the
weights of each row are divided by their sum.

The result is transformers' own eager attention with the sigmoid instead of the softmax, or an error that names what is
not supported: a layer that computes softmax attention itself, a keyword that changes results. ``check(model,
**inputs)`` verifies a model by running it.

A saved model is loaded as sigmoid attention again (see ``saving.py``) by every process that has imported this package.
The import also makes the language models of this library known to ``AutoModelForCausalLM``, as ``sigattn export``
writes them (see ``model.py``).
"""

from sigattn.optional import explain_import_errors

with explain_import_errors("transformers"):
    from sigattn.integrations.transformers import model as _model  # noqa: F401  # registers its classes
    from sigattn.integrations.transformers.check import check
    from sigattn.integrations.transformers.interface import attention, register
    from sigattn.integrations.transformers.saving import LOG_VISIBLE, NAME, Bias

    register()  # so that a process that unpickles a model, which imports this package, can run and save it

__all__ = ["LOG_VISIBLE", "NAME", "Bias", "attention", "check", "register"]
