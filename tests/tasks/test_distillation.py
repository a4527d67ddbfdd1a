"""Distillation: the loss is the task's plus the divergence from the teacher, for the inputs that the task gives."""

import pytest
import torch
from torch.nn import functional as F

from sigattn.models import LanguageModel, LanguageModelConfig, SpeechModel, SpeechModelConfig, ViT, ViTConfig, saving
from sigattn.tasks import CTC, Classification, Distillation, LanguageModelling, MaskedAutoencoding
from sigattn.tasks.distillation import distillation_loss, divergence
from sigattn.validation import SettingsError

LANGUAGE = LanguageModelConfig(num_layers=1, embed_dim=16, num_heads=2, max_seq_len=12)


def language_batch():
    tokens = torch.randint(256, (3, 13))
    return tokens[:, :-1], tokens[:, 1:]


def kl(wanted, found):
    """Return the mean KL(wanted ‖ found) by torch.distributions."""
    teacher, student = (torch.distributions.Categorical(logits=x.double()) for x in (wanted, found))
    return torch.distributions.kl_divergence(teacher, student)


def test_language_model(tmp_path):
    teacher, model = LanguageModel(LANGUAGE), LanguageModel(LANGUAGE)
    saving.save(teacher, tmp_path)
    task = Distillation(task=LanguageModelling(), teacher=str(tmp_path), weight=0.5)
    assert task.metric == "bits"
    batch = language_batch()
    loss = task.loss(model, batch)
    wanted, found = teacher(batch[0]), model(batch[0])
    expected = F.cross_entropy(found.flatten(0, 1), batch[1].flatten()) + 0.5 * kl(wanted, found).mean()
    torch.testing.assert_close(loss, expected.float())
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not any(p.requires_grad for p in task._teacher.parameters())
    assert not model._forward_hooks
    task.build(LANGUAGE)


def test_documents_reach_the_teacher():
    teacher, model = LanguageModel(LANGUAGE).eval(), LanguageModel(LANGUAGE).eval()
    tokens, targets = language_batch()
    tokens[:, 5] = 0
    task = LanguageModelling(end_token=0)
    loss = distillation_loss(task, model, (tokens, targets), teacher, 1.0) - task.loss(model, (tokens, targets))
    logits = []
    for module in (teacher, model):
        module.register_forward_hook(lambda _, __, out: logits.append(out))
        task.loss(module, (tokens, targets))
    predicting = tokens != 0  # the first token of a document is not predicted
    torch.testing.assert_close(loss, kl(*logits)[predicting].mean().float(), rtol=1e-4, atol=1e-6)


def test_mixed_images_reach_the_teacher():
    config = ViTConfig(image_size=8, patch_size=4, channels=1, num_classes=4, num_layers=1, embed_dim=16, num_heads=2)
    model = ViT(config)
    batch = torch.randn(4, 1, 8, 8), torch.arange(4)
    seen = []
    for module in (model, teacher := ViT(config)):
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    distillation_loss(Classification(mixup=0.8), model, batch, teacher, 1.0)
    assert torch.equal(*seen)
    assert not torch.equal(seen[0], batch[0])


def test_padding_of_speech_does_not_count():
    config = SpeechModelConfig(num_layers=1, embed_dim=16, num_heads=2)
    teacher, model = SpeechModel(config).eval(), SpeechModel(config).eval()
    frames, lengths = torch.randn(2, 40, config.num_mel_bins), torch.tensor([40, 20])
    batch = frames, lengths, torch.ones(2, 3, dtype=torch.long), torch.tensor([3, 2])
    loss = distillation_loss(CTC(), model, batch, teacher, 1.0) - CTC().loss(model, batch)
    (wanted, steps), (found, _) = teacher(frames, lengths), model(frames, lengths)
    each = [kl(wanted[b, :n], found[b, :n]).mean() for b, n in enumerate(steps.tolist())]
    torch.testing.assert_close(loss, torch.stack(each).mean().float(), rtol=1e-4, atol=1e-5)


def test_divergence_of_equal_outputs_is_zero():
    logits = torch.randn(2, 3, 5)
    assert divergence(logits, logits + 1).abs() < 1e-6


def test_refused(tmp_path):
    with pytest.raises(SettingsError, match="predict distributions, not MaskedAutoencoding"):
        Distillation(task=MaskedAutoencoding(), teacher=str(tmp_path))
    with pytest.raises(ValueError, match="weight must be"):
        Distillation(task=LanguageModelling(), teacher=str(tmp_path), weight=0.0)
    with pytest.raises(saving.ModelError):
        Distillation(task=LanguageModelling(), teacher=str(tmp_path / "nothing")).build(LANGUAGE)
