"""Evaluate language models with lm-evaluation-harness, by default on the paper's nine tasks (Table "lm_results").

Commands::

    sigattn lm-eval RUN       # the nine tasks; needs access to the Hugging Face Hub for their data
    sigattn lm-eval RUN --tasks lambada_openai --limit 100
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sigattn.data.tokens import make_byte_tokenizer
from sigattn.models.language import LanguageModel
from sigattn.optional import explain_import_errors

with explain_import_errors("eval"):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerFast

    from sigattn.integrations.transformers.model import wrap

# task → number of examples in the prompt
PAPER = dict.fromkeys(("arc_easy", "arc_challenge", "hellaswag", "piqa", "sciq", "winogrande", "lambada_openai"), 0)
PAPER |= {"triviaqa": 1, "webqs": 1}

# it warns that a model is passed, not the name of one
logging.getLogger(HFLM.__module__).addFilter(lambda record: "`pretrained`" not in record.getMessage())


class SigattnLM(HFLM):
    """A language model in the harness, as a model of transformers.

    Args:
        model: the model. tokenizer: of Hugging Face's ``tokenizers``; None for bytes.
        batch_size: sequences at a time.
        end_token: token that ends a document, and that replaces an empty context; None if there is none: token 0 then
            replaces an empty context.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Any = None, batch_size: int = 8, end_token: int | None = None
    ) -> None:
        tokenizer = make_byte_tokenizer() if tokenizer is None else tokenizer
        # the harness needs an end token: one that is not in the vocabulary is never generated
        end = "<|end of text|>" if end_token is None else tokenizer.id_to_token(end_token)
        padding = tokenizer.id_to_token(end_token or 0)
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=end, pad_token=padding, split_special_tokens=True
        )
        super().__init__(
            wrap(model), "causal", tokenizer=fast, batch_size=batch_size, add_bos_token=False,
            prefix_token_id=end_token or 0,
        )  # fmt: skip

    @property
    def max_gen_toks(self) -> int:
        """Number of new tokens for tasks that do not limit it: at least half of the context is the prompt's."""
        return min(256, self.max_length // 2)

    def tok_decode(self, tokens: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens, also of the padding token, which may be one of the text's."""
        return str(super().tok_decode(tokens, skip_special_tokens=False))

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        """Return Σ log p of each continuation, and True if greedy decoding gives it."""
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise ValueError(f"a continuation of {longest} tokens does not fit in a context of {self.max_length}")
        return super()._loglikelihood_tokens(requests, *args, **kwargs)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each prompt."""
        limits = (normalize_gen_kwargs(dict(r.args[1]), self.max_gen_toks)["max_gen_toks"] for r in requests)
        if (longest := max(limits, default=0)) >= self.max_length:
            raise ValueError(
                f"{longest} new tokens leave no room for a prompt in a context of {self.max_length}: lower "
                "max_gen_toks in the task's generation_kwargs"
            )
        return super().generate_until(requests, disable_tqdm)


def evaluate(
    lm: SigattnLM, tasks: Sequence[str] = (), *, include: Path | None = None, limit: int | None = None
) -> dict[str, dict[str, float]]:
    """Return the metrics of each task.

    Args:
        lm: the model. tasks: names of tasks; empty for the paper's nine. limit: number of samples of each task.
        include: folder of further tasks (YAML). The harness runs the Python code that a task names with ``!function``:
            include only folders that you trust.

    Raises:
        ValueError: for an unknown task.
        NotADirectoryError: if include is not a folder, which the harness would ignore.
    """
    if include is not None and not include.is_dir():
        raise NotADirectoryError(f"evaluate: include={str(include)!r} is not a folder")
    manager = TaskManager(include_path=None if include is None else str(include))
    unknown = [t for t in tasks if t not in manager.all_tasks]
    if unknown:
        raise ValueError(f"lm-evaluation-harness has no task {', '.join(unknown)}")
    metrics: dict[str, dict[str, float]] = {}
    for shots in (0, 1):
        # tasks that are not the paper's keep the number of examples of their own definition
        chosen = [t for t in (tasks or PAPER) if PAPER.get(t, 0) == shots]
        if not chosen:
            continue
        report: Any = simple_evaluate(
            model=lm, tasks=chosen, num_fewshot=shots or None, task_manager=manager, limit=limit, log_samples=False
        )
        for task, values in report["results"].items():
            metrics[task] = {
                k.removesuffix(",none"): float(v) for k, v in values.items() if isinstance(v, (int, float))
            }
    return metrics
