"""Compares fine-tuning with transformers and PEFT: loss, gradients, a run and its folders."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import families
from mlx_t5.backend import mx, tree_flatten, tree_unflatten
from mlx_t5.checkpoints.adapters import LoraConfig
from mlx_t5.checkpoints.names import tensor_names
from mlx_t5.convert import convert
from mlx_t5.model import load
from mlx_t5.network.linear import Matrix
from mlx_t5.network.sharing import plain_weights
from mlx_t5.training.batches import collate
from mlx_t5.training.fine_tuning import adapt, write_adapter, write_model
from mlx_t5.training.learner import Learner, adafactor, adamw, constant, linear
from mlx_t5.training.loss import token_loss
from mlx_t5.training.teacher_answers import given

peft = pytest.importorskip("peft")
PAIRS = [((5, 9, 40, 1), (7, 8, 30, 1)), ((6, 1), (3, 1)), ((4, 44, 9, 20, 17, 1), (30, 2, 1))]
LORA = LoraConfig(r=3, lora_alpha=5.0, target_modules="all-linear")
KINDS = {"lora": LORA, "dora": replace(LORA, use_dora=True), "full": None}


def peft_model(reference, lora, dropout=0.0):
    """Returns PEFT's model with adapters that differ from their initial values."""
    options = {"r": lora.r, "lora_alpha": lora.lora_alpha, "use_dora": lora.use_dora}
    config = peft.LoraConfig(
        target_modules=lora.target_modules, lora_dropout=dropout, use_rslora=lora.use_rslora,
        task_type="SEQ_2_SEQ_LM", **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(copy.deepcopy(reference.model), config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_magnitude" in name:
                weight.mul_(1.1)
            elif "lora_" in name:
                weight.normal_(std=0.05, generator=generator)
    return model


def their_batch(config, pairs=PAIRS):
    """Returns the pairs as a batch for transformers."""
    width, length = (max(len(pair[i]) for pair in pairs) for i in (0, 1))
    pad = config.pad_token_id
    source = torch.tensor([[*s, *[pad] * (width - len(s))] for s, _ in pairs])
    mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s, _ in pairs])
    labels = torch.tensor([[*a, *[-100] * (length - len(a))] for _, a in pairs])
    return {"input_ids": source, "attention_mask": mask, "labels": labels}


def our_batch(model, pairs=PAIRS):
    config = model.config
    start, pad = config.decoder_start_token_id, config.pad_token_id
    return collate([given(*pair) for pair in pairs], start, pad, keep_states=False)


def by_our_names(model, named):
    """Returns torch's parameters as arrays, by this project's names."""
    names = {a.removesuffix(".weight"): b for a, b in tensor_names(model.config).items()}
    arrays = {}
    for name, tensor in named:
        name = name.removeprefix("base_model.model.").removesuffix(".weight")
        layer, lora, part = name.partition(".lora_")
        part = f"lora_{part.removesuffix('.default')}" if lora else "weight"
        if layer in names:
            arrays[f"{names[layer].removesuffix('.weight')}.{part}"] = tensor.detach().numpy()
    return arrays


def torch_gradients(reference, kind):
    """Returns torch's loss of the pairs, and the parameters that have a gradient."""
    lora = KINDS[kind]
    model = peft_model(reference, lora) if lora else copy.deepcopy(reference.model)
    loss = model(**their_batch(reference.model.config)).loss
    loss.backward()
    trained = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    return loss.item(), trained


def check_gradients(gradients, expected, tolerance):
    """Asserts equal gradients, up to `tolerance` times the largest number of each."""
    assert gradients.keys() >= expected.keys()
    for name, gradient in expected.items():
        gradient = np.array(gradient)
        most = tolerance * np.abs(gradient).max()
        np.testing.assert_allclose(np.array(gradients[name]), gradient, tolerance, most, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, kind",
    [
        *((family.name, "full") for family in families.FAMILIES),
        *((name, kind) for name in ("t5", "byt5") for kind in ("lora", "dora")),
    ],
)
def test_loss_and_gradients_are_transformers_and_pefts(reference_of, family, kind):
    expected, trained = torch_gradients(reference_of(family), kind)
    model, _ = load(reference_of(family).folder, "float32")
    if KINDS[kind]:
        adapt(model, KINDS[kind])
    learner = Learner(model, token_loss(model, 0.0), 10, 0.01, compiled=False)
    weights = {n: mx.array(a) for n, a in by_our_names(model, trained).items()}
    assert weights.keys() == learner.begin().weights.keys()
    learner.put(weights)
    loss, slopes = learner._gradient(weights, our_batch(model).arrays)
    count = sum(len(answer) for _, answer in PAIRS)
    assert loss.item() / count == pytest.approx(expected, rel=1e-5)
    gradients = by_our_names(model, ((name, p.grad) for name, p in trained))
    check_gradients({name: slope / count for name, slope in slopes.items()}, gradients, 1e-4)


def optimizers(kind, parameters, decay):
    """Returns this project's optimizer and torch's of the same kind."""
    hf_adafactor = transformers.optimization.Adafactor
    if kind == "adamw":
        torch_optimizer = torch.optim.AdamW(parameters, 0.01, weight_decay=decay)
        return adamw(), torch_optimizer
    if kind == "adafactor":
        return adafactor(), hf_adafactor(
            parameters, lr=0.01, relative_step=False, weight_decay=decay
        )
    return adafactor(True), hf_adafactor(parameters, lr=None, relative_step=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, optimizer",
    [("lora", "adamw"), ("dora", "adafactor"), ("full", "adafactor"), ("full", "relative")],
)
def test_a_run_has_the_losses_of_transformers_and_peft(reference_of, kind, optimizer):
    reference = reference_of("flan")
    lora = KINDS[kind]
    hf_model = peft_model(reference, lora) if lora else copy.deepcopy(reference.model)
    trained = [(name, p) for name, p in hf_model.named_parameters() if p.requires_grad]
    decay = {"adamw": 0.1, "adafactor": 2.0}[optimizer] if lora else 0.0
    mlx_optimizer, torch_optimizer = optimizers(optimizer, [p for _, p in trained], decay)
    model, _ = load(reference.folder, "float32")
    if lora:
        adapt(model, lora)
    weights = {n: mx.array(a) for n, a in by_our_names(model, trained).items()}
    batches = [[PAIRS[0], PAIRS[1]], [PAIRS[2]], PAIRS]
    learner = Learner(
        model, token_loss(model, 0.0), 10, 0.01, False, constant(2), mlx_optimizer,
        weight_decay=decay,
    )  # fmt: skip
    state, losses, expected = replace(learner.begin(), weights=weights), [], []
    for step in range(6):
        pairs = batches[step % 3]
        state, loss = learner.step(state, [our_batch(model, pairs)])
        losses.append(loss)
        for group in torch_optimizer.param_groups:
            group["lr"] = None if optimizer == "relative" else 0.01 * constant(2)(step)
        torch_optimizer.zero_grad()
        their_loss = hf_model(**their_batch(reference.model.config, pairs)).loss
        their_loss.backward()
        torch_optimizer.step()
        expected.append(their_loss.item())
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert losses[-1] < 0.9 * losses[2]


def without_dropout(model):
    """Returns a copy of a torch model that drops nothing in training."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


class Batches(transformers.Trainer):
    """transformers' Trainer, on batches in their order."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_thirty_steps_are_those_of_transformers_trainer(reference_of, tmp_path, kind):
    """The losses and the weights, with weight decay, clipped gradients and a decaying rate."""
    pytest.importorskip("accelerate")
    reference, lora = reference_of("t5"), KINDS[kind]
    hf_model = without_dropout(peft_model(reference, lora) if lora else reference.model)
    model, _ = load(reference.folder, "float32")
    if lora:
        adapt(model, lora)
    trained = [(name, p) for name, p in hf_model.named_parameters() if p.requires_grad]
    weights = {n: mx.array(a.copy()) for n, a in by_our_names(model, trained).items()}
    batches = [[[PAIRS[0], PAIRS[1]], [PAIRS[2]], PAIRS][i % 3] for i in range(30)]
    options = transformers.TrainingArguments(
        str(tmp_path), max_steps=30, per_device_train_batch_size=1, learning_rate=0.003,
        weight_decay=0.1, max_grad_norm=1.0, lr_scheduler_type="linear", optim="adamw_torch",
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data = [their_batch(reference.model.config, pairs) for pairs in batches]
    trainer = Batches(hf_model, options, data_collator=lambda rows: rows[0], train_dataset=data)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert min(entry["grad_norm"] for entry in log[:3]) > 1, "else nothing is clipped"
    learner = Learner(
        model, token_loss(model, 0.0), 30, 0.003, False, linear(30, 0), adamw(), max_grad_norm=1.0,
        weight_decay=0.1,
    )  # fmt: skip
    state, losses = replace(learner.begin(), weights=weights), []
    for pairs in batches:
        state, loss = learner.step(state, [our_batch(model, pairs)])
        losses.append(loss)
    # Each BLAS rounds differently, which AdamW's division by small gradients makes larger.
    expected = [entry["loss"] for entry in log]
    np.testing.assert_allclose(losses[:10], expected[:10], rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(losses, expected, rtol=5e-2, atol=1e-4)
    most = 1e-4 if lora else 8e-3  # Adam enlarges rounding where gradients are nearly zero
    for name, expected in by_our_names(model, trained).items():
        np.testing.assert_allclose(np.array(state.weights[name]), expected, atol=most, err_msg=name)
    learner.put(state.weights)
    hf_model.eval()
    with torch.no_grad():
        expected = hf_model(**their_batch(reference.model.config)).loss.item()
    assert learner.held_out_loss([our_batch(model)]) == pytest.approx(expected, rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "flan", "umt5-tied"])
def test_dropout_is_that_of_transformers_with_the_same_masks(reference_of, monkeypatch, family):
    model, _ = load(reference_of(family).folder, "float32")
    learner = Learner(model, token_loss(model, 0.0), 10, 0.01, False, drop=model.drop)
    weights, batch, key = learner.begin().weights, our_batch(model), mx.random.key(3)
    loss, slopes = learner._gradient(weights, batch.arrays, key)
    assert loss.item() != pytest.approx(learner._gradient(weights, batch.arrays)[0].item())
    model.grad_checkpoint = True
    assert learner._gradient(weights, batch.arrays, key)[0].item() == pytest.approx(loss.item())
    compiled = Learner(model, token_loss(model, 0.0), 10, 0.01, True, drop=model.drop)
    assert compiled._slopes(weights, batch.arrays, key)[1].keys() == weights.keys()  # traced only
    model.drop(key)
    places = []  # in the order in which torch drops
    for stack in model.stacks:
        layers = [part for layer in stack.layers for part in layer.children().values()]
        places += [(stack, 0), *((part, i) for part in layers for i in (0, 1)), (stack, 1)]
    upcoming = iter(places)

    def dropout(x, *_, **__):
        module, place = next(upcoming)
        assert module.dropout.rate == 0.1
        shape = x.shape if x.ndim == 4 else (-1, x.shape[-1])
        ones = mx.ones([int(n) for n in torch.empty(x.shape).reshape(shape).shape])
        return x * torch.tensor(np.array(module.dropout(ones, place))).reshape(x.shape)

    hf_model = copy.deepcopy(reference_of(family).model)
    hf_model.set_attn_implementation("eager")
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    labels = np.where(np.array(batch.counted) > 0, np.array(batch.top_ids)[:, 0], -100)
    arrays = np.array(batch.source), np.array(batch.mask), labels.reshape(len(PAIRS), -1)
    names = ("input_ids", "attention_mask", "labels")
    tensors = (torch.tensor(array.astype(np.int64)) for array in arrays)
    expected = hf_model.train()(**dict(zip(names, tensors, strict=True))).loss
    assert next(upcoming, None) is None
    expected.backward()
    count = batch.counted.sum().item()
    assert loss.item() / count == pytest.approx(expected.item(), rel=1e-5)
    grads = [(name, p.grad) for name, p in hf_model.named_parameters() if p.grad is not None]
    gradients = by_our_names(model, grads)
    check_gradients({name: slope / count for name, slope in slopes.items()}, gradients, 2e-4)


def logits(model):
    """Returns the logits of the pairs' first positions."""
    batch = our_batch(model)
    return np.array(model(batch.source, batch.tokens[:, :2], batch.mask))


def adapted(reference_of, family, lora, num_layers=-1, dropout=0.0, folder=None):
    """Returns a model whose adapters differ from their initial values, and its weights."""
    model, _ = load(folder or reference_of(family).folder, "float32")
    adapters = adapt(model, lora, num_layers, dropout, seed=7)
    weights = Learner(model, token_loss(model, 0.0), 10, 0.01).begin().weights
    for i, name in enumerate(sorted(weights)):
        noise = mx.random.normal(weights[name].shape, scale=0.1, key=mx.random.key(i))
        weights[name] = noise + weights[name] * ("magnitude" in name)
    model.update(tree_unflatten(list(weights.items())))
    return model, adapters, weights


@pytest.mark.parametrize(
    "family, entries, num_layers",
    [
        ("t5", {}, -1),
        ("flan", {"use_dora": True}, -1),
        ("byt5", {"target_modules": ("q", "wi_1"), "use_rslora": True}, 1),
    ],
)
def test_peft_loads_the_adapter_and_ours_merges_it(
    reference_of, tmp_path, family, entries, num_layers
):
    lora = replace(LORA, **entries)
    model, _, weights = adapted(reference_of, family, lora, num_layers)
    expected = logits(model)
    more = {"lora_dropout": 0.1, "translation_prefix": "{target}: "}
    path = write_adapter(tmp_path / "lora", model, weights, lora, num_layers, **more)
    assert json.loads((path / "translation.json").read_text()) == {
        "translation_prefix": "{target}: "
    }
    assert "translation_prefix" not in (path / "adapter_config.json").read_text()
    plain, _ = load(reference_of(family).folder, "float32")
    merged, _ = load(reference_of(family).folder, "float32", adapter=path)
    np.testing.assert_allclose(logits(merged), expected, rtol=2e-4, atol=2e-4)
    assert np.abs(logits(plain) - expected).max() > 0.1
    hf_model = peft.PeftModel.from_pretrained(
        copy.deepcopy(reference_of(family).model), path
    ).eval()
    batch = our_batch(model)
    source, mask, tokens = (
        torch.tensor(np.array(a)) for a in (batch.source, batch.mask, batch.tokens[:, :2])
    )
    with torch.no_grad():
        hf_logits = hf_model(
            input_ids=source, attention_mask=mask.long(), decoder_input_ids=tokens
        ).logits.numpy()
    np.testing.assert_allclose(hf_logits, expected, rtol=2e-4, atol=2e-4)
    layers = {name.rpartition(".")[0] for name in weights}
    assert num_layers < 0 or {name.split(".")[2] for name in layers} == {"5", "1"}


@pytest.mark.parametrize("family", ["t5", "flan", "umt5-tied", "madlad"])
def test_transformers_loads_the_whole_model(reference_of, tmp_path, family):
    model, _ = load(reference_of(family).folder, "float32")
    learner = Learner(model, token_loss(model, 0.0), 10, 0.05, compiled=False)
    state, _ = learner.step(learner.begin(), [our_batch(model)])
    learner.put(state.weights)
    expected = logits(model)
    path = write_model(tmp_path / "full", model, reference_of(family).folder)
    again, _ = load(path, "float32")
    np.testing.assert_allclose(logits(again), expected, rtol=1e-5, atol=1e-5)
    hf_model = type(reference_of(family).model).from_pretrained(path).eval()
    if family.startswith("umt5"):  # see families.build
        hf_model.config.tie_word_embeddings = not reference_of(family).family.separate_head
    reference = replace(reference_of(family), model=hf_model)
    batch = our_batch(model)
    arrays = (np.array(a).tolist() for a in (batch.source, batch.tokens[:, :2], batch.mask))
    np.testing.assert_allclose(reference.logits(*arrays), expected, rtol=2e-4, atol=2e-4)
    plain, _ = load(reference_of(family).folder, "float32")
    assert np.abs(logits(plain) - expected).max() > 0.1


@pytest.mark.parametrize("dora", [False, True])
def test_a_checkpointed_step_is_the_same_step_also_with_dropout(reference_of, dora):
    lora = replace(LORA, use_dora=dora)
    results = []
    for checkpoint in (False, True):
        model, adapters, weights = adapted(reference_of, "flan", lora, dropout=0.3)
        model.grad_checkpoint = checkpoint
        learner = Learner(model, token_loss(model, 0.0), 10, 0.01, False, drop=adapters.drop)
        batch = our_batch(model).arrays
        results.append(learner._gradient(weights, batch, mx.random.key(1)))
        other, _ = learner._gradient(weights, batch, mx.random.key(2))
        plain, _ = learner._gradient(weights, batch)
        assert len({results[-1][0].item(), other.item(), plain.item()}) == 3
        # Traced as on a GPU but not run, because a C++ compiler would take minutes on a CPU.
        compiled = Learner(model, token_loss(model, 0.0), 10, 0.01, True, drop=adapters.drop)
        _, shaped = compiled._slopes(weights, batch, mx.random.key(1))
        assert {n: a.shape for n, a in shaped.items()} == {n: a.shape for n, a in weights.items()}
    (one, slopes), (two, same) = results
    assert one.item() == pytest.approx(two.item(), rel=1e-6)
    check_gradients(slopes, same, 1e-5)


def test_dropout_applies_to_the_adapters_input_alone(reference_of):
    """As in PEFT, single elements of x are dropped and the remaining ones are scaled up."""
    model, adapters, _ = adapted(reference_of, "t5", LORA, dropout=0.5)
    x = mx.random.normal((4, 32), key=mx.random.key(0))
    layer = model.encoder.layers[0].self_attention.q
    whole = Matrix.of(layer).times(x)
    adapters.drop(mx.random.key(5))
    matrix = Matrix.of(layer)
    mask = mx.random.bernoulli(0.5, x.shape, matrix.key)
    expected = x @ layer.weight.T + matrix.scale * (
        mx.where(mask, 2 * x, 0) @ layer.lora_A.T @ layer.lora_B.T
    )
    np.testing.assert_allclose(np.array(matrix.times(x)), np.array(expected), atol=1e-5)
    adapters.drop(None)
    assert mx.array_equal(Matrix.of(layer).times(x), whole)


def test_a_row_of_zeros_has_no_direction_and_stays(reference_of):
    model, _ = load(reference_of("flan").folder, "float32")
    layer = model.encoder.layers[0].self_attention.v
    layer.weight = mx.where(mx.arange(len(layer.weight))[:, None] == 3, 0, layer.weight)
    adapt(model, KINDS["dora"])
    learner = Learner(model, token_loss(model, 0.0), 10, 0.01, compiled=False)
    state = learner.begin()
    for _ in range(2):
        state, loss = learner.step(state, [our_batch(model)])
        assert np.isfinite(loss)
    learner.put(state.weights)
    changed = Matrix.of(layer).times(mx.eye(layer.weight.shape[1])).T
    assert not mx.any(changed[3]).item() and mx.all(mx.any(changed[4:], axis=1)).item()


@pytest.mark.parametrize("dora", [False, True])
def test_a_quantized_model_is_adapted_as_its_dequantized_weights(reference_of, tmp_path, dora):
    options = {"quantize": True, "q_group_size": 32, "quant_predicate": "embed_8"}
    folder = convert(reference_of("flan").folder, tmp_path / "4bit", "float32", **options)
    lora = replace(LORA, use_dora=dora, target_modules=("q", "v", "wi_0", "o"))
    model, _, weights = adapted(reference_of, "flan", lora, folder=folder)
    plain, _ = load(reference_of("flan").folder, "float32")
    dense = plain_weights(model)
    names = dict(tree_flatten(plain.parameters()))
    plain.update(tree_unflatten([(name, dense[name]) for name in names]))
    adapt(plain, lora)
    model.grad_checkpoint = dora
    learners = [Learner(m, token_loss(m, 0.0), 10, 0.01) for m in (model, plain)]
    assert learners[0].begin().weights.keys() == weights.keys()
    (loss, slopes), (expected, right) = (
        learner._gradient(weights, our_batch(model).arrays) for learner in learners
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    check_gradients(slopes, right, 2e-3)
