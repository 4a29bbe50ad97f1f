"""Reading a config.json: every field is taken, checked or known not to matter; anything else is a problem."""

from collections.abc import Collection
from typing import Any

from kda_jax.errors import nearest

# Written by transformers into any config.json, and about generation, training or bookkeeping: no logits depend on them.
BOOKKEEPING = frozenset(
    "_name_or_path architectures auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size "
    "decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id "
    "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label "
    "is_decoder is_encoder_decoder label2id length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams "
    "num_labels num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix problem_type pruned_heads "
    "remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params "
    "temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version "
    "typical_p use_bfloat16 use_cache".split()
)


class Fields:
    """A config.json and what is wrong with it so far."""

    def __init__(self, raw: dict, problems: list[str], place: str = ""):
        self._raw, self._problems, self._known, self._place = raw, problems, set(BOOKKEEPING), place

    def take(self, *names: str, default: Any = None) -> Any:
        """The value of a field that some write under another name; two that differ are a problem."""
        self._known |= set(names)
        found = [name for name in names if name in self._raw]
        for name in found[1:]:
            if self._raw[name] != self._raw[found[0]]:
                self.problem(f"{found[0]} is {self._raw[found[0]]!r} and {name} is {self._raw[name]!r}: they mean the same")
        return self._raw[found[0]] if found else default

    def given(self, defaults: dict[str, tuple[str, ...]]) -> dict[str, Any]:
        """field -> value of those that are there, under the field's own name or another one that `defaults` lists."""
        absent = object()
        values = {name: self.take(name, *others, default=absent) for name, others in defaults.items()}
        return {name: value for name, value in values.items() if value is not absent}

    def require(self, name: str, *allowed: Any) -> None:
        """A field that changes the model, of which only these values are implemented; the first is what its absence means."""
        value = self.take(name, default=allowed[0])
        if value not in allowed:
            self.problem(f"{name} is {value!r}, but only {' or '.join(map(repr, allowed))} is implemented")

    def ignore(self, names: Collection[str]) -> None:
        """Fields on which no logits depend."""
        self._known |= set(names)

    def ignore_rest(self) -> None:
        """For an object around the model's own, whatever it holds."""
        self._known |= self._raw.keys()

    def section(self, name: str) -> "Fields":
        """The fields of an object inside this one; empty, and a problem, if it is not there. The caller closes it."""
        value = self.take(name)
        if not isinstance(value, dict):
            self.problem(f"{name} is not an object")
            value = {}
        return Fields(value, self._problems, f"{self._place}{name}: ")

    def problem(self, sentence: str) -> None:
        self._problems.append(f"config.json: {self._place}{sentence}")

    def close(self) -> None:
        """Everything not taken, required or ignored by now is a problem."""
        for name in sorted(self._raw.keys() - self._known):
            self.problem(f"unknown field {name}{nearest(name, self._known)}")

    def build(self, cls: type, values: dict[str, Any]) -> Any:
        """`cls(**values)`, or None and a problem."""
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            self.problem(str(error))
            return None
