"""A table for each kind of JSON file in a checkpoint: the keys that the libraries read, and what becomes of them here.

The libraries are sentence-transformers 5.1 and 6.2, transformers 4.57 and 5.23, and tokenizers. docs/checkpoints.md
shows the tables; tests/engine/test_key_tables.py walks them against the installed libraries.
"""

from __future__ import annotations

from embert.engine.files.json_files import Key, Table, honored, irrelevant, refused

METADATA = irrelevant("a description for people and tools")
TRAINING = irrelevant("training only")
GENERATION = irrelevant("text generation only")
DTYPE = irrelevant("--dtype decides; weights are read as they are stored")
OUTPUT = irrelevant("which outputs a call returns in addition to the hidden states")
KERNEL = irrelevant("which kernels compute the same")
REMOTE_CODE = irrelevant("no remote code is ever run; the readers take what such code computes from the other keys")
NO_PADDING = irrelevant("texts are packed, and nothing is padded")
DECODING = irrelevant("ids to text only")
OFFSETS = irrelevant("offsets only")
CHAT = irrelevant("chat templates only")
LOADING = irrelevant("how the library finds or caches files")

MODULES: Table = {
    "idx": irrelevant("modules run in the order of the list"),
    "name": irrelevant("a name inside the library"),
    "path": honored("the module's folder"),
    "type": honored("the module's class; classes without a table below are refused"),
    "kwargs": irrelevant("names of options of encode() that the module takes"),
}

SENTENCE_BERT_CONFIG: Table = {
    "max_seq_length": honored("the most tokens of a text, in place of the tokenizer's model_max_length"),
    "do_lower_case": honored("texts are lowercased first"),
    "transformer_task": honored("feature-extraction, sequence-classification, fill-mask or text-generation"),
    "modality_config": honored("of text: the model's usual output; message: the chat template of pairs; no others"),
    "module_output_name": honored("the name of that output"),
    "processing_kwargs": honored("text and common: see the next table; chat_template: its variables"),
    **dict.fromkeys(
        ("query_length", "document_length", "query_expansion"), honored("multi-vectors only, refused otherwise")
    ),
    "processor_kwargs": honored("these replace fields of tokenizer_config.json: see their table"),
    "tokenizer_args": honored("the former name of processor_kwargs"),
    "model_kwargs": honored("keys that change no result; others are refused"),
    "model_args": honored("the former name of model_kwargs"),
    "config_kwargs": honored("keys that change no result; others are refused"),
    "config_args": honored("the former name of config_kwargs"),
    "tokenizer_name_or_path": refused("a tokenizer of another model", None),
    "unpad_inputs": NO_PADDING,
    "backend": irrelevant("which library computes"),
    "cache_dir": LOADING,
}

PROCESSING_KWARGS: Table = {
    "max_length": honored("the most tokens of a text, in place of every other limit"),
    "truncation": refused("which text of a pair is cut", None, True, "longest_first"),
    "add_special_tokens": refused("texts without special tokens", True),
    "split_special_tokens": refused("special tokens that texts spell out", None, False),
    "is_split_into_words": refused("texts that are lists of words", False),
    "return_token_type_ids": refused("token types", None),
    "return_attention_mask": NO_PADDING,
    "logits_to_keep": GENERATION,
    "max_new_tokens": GENERATION,
    **dict.fromkeys(("padding", "pad_to_multiple_of", "padding_side"), NO_PADDING),
    "stride": irrelevant("texts that are cut have no second part"),
    "verbose": METADATA,
    **dict.fromkeys(
        ("return_tensors", "return_special_tokens_mask", "return_offsets_mapping", "return_length"), OUTPUT
    ),
    "return_overflowing_tokens": refused("a row for each part of a long text", False),
}

CONFIG_SENTENCE_TRANSFORMERS: Table = {
    "model_type": honored("SentenceTransformer, CrossEncoder, SparseEncoder, MultiVectorEncoder, ColBERT"),
    "prompts": honored("texts before the input, by name"),
    "default_prompt_name": honored("the prompt of requests that name none"),
    "activation_fn": honored("what makes scores of a CrossEncoder's logits"),
    "max_active_dims": honored("the most weights of a sparse vector: the largest are kept"),
    "truncate_dim": refused("the dimensions of a vector; requests ask for them with `dimensions`", None),
    "similarity_fn_name": honored(
        "meanmaxsim: late interaction's scores are means; others: how clients compare vectors"
    ),
    "keep_in_fp32_modules": DTYPE,
    "__version__": METADATA,
    "requirements": irrelevant("versions of Python packages that this server does not use"),
    # PyLate, and the names of its fields in sentence-transformers.
    "query_prefix": honored("late interaction: before queries"),
    "document_prefix": honored("late interaction: before documents"),
    "query_length": honored("late interaction: tokens of a query"),
    "document_length": honored("late interaction: tokens of a document"),
    "attend_to_expansion_tokens": honored("late interaction: whether a query sees its expansion; DeBERTa has to"),
    "attend_to_mask_tokens": honored("attend_to_expansion_tokens by its older name"),
    "query_expansion": honored("late interaction: how queries are expanded, or null"),
    "do_query_expansion": honored("late interaction: whether queries are expanded"),
    "skiplist_words": honored("late interaction: words without a vector"),
}

WIDTH = dict.fromkeys(("embedding_dimension", "word_embedding_dimension"), irrelevant("follows from the weights"))
ROWS = {
    "module_input_name": honored("sentence_embedding, or token_embeddings for late interaction"),
    "module_output_name": honored("the same name; another one is refused"),
}

POOLING: Table = {
    "pooling_mode": honored("one of the six, or several, whose rows are joined"),
    **{
        f"pooling_mode_{mode}": honored("the mode in versions 1 to 5")
        for mode in (
            "cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken",
        )
    },
    "include_prompt": honored("whether a prompt's tokens are pooled"),
    **WIDTH,
}  # fmt: skip
DENSE: Table = {
    "in_features": honored("columns in"),
    "out_features": honored("columns out"),
    "bias": honored("whether there is a bias"),
    "activation_function": honored("torch's class"),
    **ROWS,
    "use_residual": honored("whether the rows that it takes are added; refused for late interaction"),
}
LAYER_NORM: Table = {"dimension": honored("columns")}
DROPOUT: Table = {"dropout": TRAINING}
SPLADE_POOLING: Table = {
    "pooling_strategy": honored("max"),
    "activation_function": honored("relu or log1p_relu"),
    **WIDTH,
    "chunk_size": irrelevant("how much is computed together"),
}
MULTI_VECTOR_MASK: Table = {
    "skiplist_words": honored("words without a vector"),
    "skiplist_tasks": honored("query, document"),
    "keep_only_token_ids": honored("tokens of documents that alone have a vector"),
}
TOKEN_POOLING: Table = {
    "pool_factor": honored("vectors before for each one after; more than 1 needs scipy"),
    "num_protected_tokens": honored("first vectors that are left as they are"),
    "normalize_embeddings": honored("vectors have length 1 afterwards"),
    "tasks": honored("query, document"),
}
LOGIT_SCORE: Table = {
    "true_token_id": honored("the token whose logit is the score"),
    "false_token_id": honored("the token whose logit is subtracted"),
    "module_input_name": honored("causal_logits"),
}
# A module's class → the table of its config.json.
MODULE_CONFIGS: dict[str, Table] = {
    "Pooling": POOLING,
    "Dense": DENSE,
    "Normalize": ROWS,
    "LayerNorm": LAYER_NORM,
    "Dropout": DROPOUT,
    "SpladePooling": SPLADE_POOLING,
    "MultiVectorMask": MULTI_VECTOR_MASK,
    "HierarchicalTokenPooling": TOKEN_POOLING,
    "LogitScore": LOGIT_SCORE,
}
# Modules of sentence-transformers that modules.json may name and that are refused by that name.
REFUSED_MODULES = (
    "BoW", "CLIPModel", "CNN", "LSTM", "LambdaTokenPooling",
    "Router", "SparseAutoEncoder", "SparseStaticEmbedding", "TokenPooling", "WeightedLayerPooling",
    "WordEmbeddings", "WordWeights",
)  # fmt: skip

ADAPTER_START = irrelevant("how weights were made before the training; the file has them as they are after it")
OTHER_KIND = "another kind of adapter"

# Of the files that peft 0.21 writes and reads.
ADAPTER_CONFIG: Table = {
    "peft_type": refused(OTHER_KIND, "LORA"),
    "r": honored("the rank"),
    "lora_alpha": honored("the scale: lora_alpha / r"),
    "use_rslora": honored("the scale: lora_alpha / √r"),
    "rank_pattern": honored("ranks of some modules"),
    "alpha_pattern": honored("lora_alpha of some modules"),
    "target_modules": honored("a tensor of another module is an error"),
    **dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"), honored("likewise")),
    "modules_to_save": honored("modules that are stored whole take the base's place"),
    "bias": honored("biases that are stored take the base's place"),
    "lora_bias": honored("B has a bias"),
    "base_model_name_or_path": honored("the base model, where the folder has none: a folder, or an id on the hub"),
    "fan_in_fan_out": irrelevant("PEFT sets it to false for linear layers, and no model here has others"),
    "init_lora_weights": refused(
        "an initialization that changes the base's weights", True, False, None, "gaussian", "eva", "orthogonal"
    ),
    "use_dora": refused("DoRA, whose magnitudes transformers and PEFT read differently", False, None),
    "use_qalora": refused("QALoRA", False, None),
    "use_bdlora": refused("BD-LoRA", None, False),
    "alora_invocation_tokens": refused("aLoRA: an adapter of some tokens", None),
    "layer_replication": refused("layers that are repeated", None),
    "trainable_token_indices": refused("separate rows of the word table", None),
    "target_parameters": refused("parameters outside of modules", None, []),
    "arrow_config": refused("routing between adapters", None),
    "kasa_config": refused("KaSA, which changes the base's weights", None),
    "monteclora_config": refused("samples of weights", None),
    "ensure_weight_tying": refused("one adapter of the word table and the decoder", False, None),
    **dict.fromkeys(("lora_dropout", "velora_config", "inference_mode"), TRAINING),
    **dict.fromkeys(("eva_config", "corda_config", "lora_ga_config"), ADAPTER_START),
    "loftq_config": irrelevant("LoftQ's, which init_lora_weights chooses"),
    "qalora_group_size": irrelevant("QALoRA's, which use_qalora chooses"),
    "megatron_config": irrelevant("how Megatron cuts layers"),
    "megatron_core": irrelevant("the name of Megatron's package"),
    "runtime_config": irrelevant("where weights lie"),
    "task_type": irrelevant("the class that was trained; config.json of the base decides what is served"),
    "auto_mapping": irrelevant("the class that was trained"),
    "peft_version": irrelevant("the library that wrote the file"),
    "revision": irrelevant("transformers and sentence-transformers load the base's usual revision"),
}

SPECIAL_TOKEN = honored("the token, and where the class puts it into its template")
TOKENIZER_CONFIG: Table = {
    "tokenizer_class": honored("the class whose normalizer, pre-tokenizer and template replace tokenizer.json's"),
    **dict.fromkeys(
        ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"), SPECIAL_TOKEN
    ),
    "additional_special_tokens": honored("further special tokens, by version 4's name"),
    "extra_special_tokens": honored("further special tokens"),
    "model_specific_special_tokens": honored("further special tokens, by name"),
    "*_token": honored("a further special token by any other name"),
    "added_tokens_decoder": honored("all added tokens, in place of tokenizer.json's"),
    "do_lower_case": honored("BERT's, MPNet's, ALBERT's and DeBERTa's classes"),
    **dict.fromkeys(("strip_accents", "tokenize_chinese_chars"), honored("BERT's and MPNet's classes")),
    "keep_accents": honored("ALBERT's class"),
    "split_by_punct": honored("DeBERTa's class"),
    "unk_id": honored("DeBERTa's class, where the vocabulary has no unknown token of score 0"),
    "add_prefix_space": honored("the classes of RoBERTa, XLM-RoBERTa, CamemBERT, ALBERT, DeBERTa, Qwen2 and LLaMA"),
    "legacy": honored("LLaMA's class"),
    "model_max_length": honored("the most tokens of a text"),
    "max_len": honored("model_max_length by its older name"),
    "truncation_side": honored("the end that is cut off, where a request does not say"),
    "split_special_tokens": honored("special tokens that texts spell out are text"),
    "model_input_names": honored("whether pairs have token types"),
    "trim_offsets": OFFSETS,
    "fast_tokenizer_files": refused("another file than tokenizer.json", None, [], ["tokenizer.json"]),
    "init_inputs": refused("positional arguments of a class", None, []),
    "fix_mistral_regex": refused("another pre-tokenizer of Mistral's models", None, False),
    **dict.fromkeys(("padding_side", "pad_to_multiple_of", "pad_token_type_id", "padding"), NO_PADDING),
    **dict.fromkeys(
        ("stride", "truncation_strategy", "max_length", "truncation"),
        irrelevant("the library cuts by model_max_length, the longest text first, whatever this says"),
    ),
    **dict.fromkeys(
        ("add_bos_token", "add_eos_token"),
        irrelevant("the library drops it where there is a tokenizer.json; the log says so where that differs"),
    ),
    **dict.fromkeys(
        ("do_basic_tokenize", "never_split", "wordpieces_prefix", "do_subword_tokenize", "word_tokenizer_type",
         "subword_tokenizer_type", "errors", "sp_model_kwargs", "remove_space", "from_slow", "use_fast",
         "clean_text", "normalization", "full_tokenizer_file", "vocab_type"),
        irrelevant("read by version 4's classes in Python, not by those that read tokenizer.json"),
    ),
    **dict.fromkeys(
        ("clean_up_tokenization_spaces", "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
         "spaces_between_special_tokens"),
        DECODING,
    ),
    "chat_template": honored("rerankers: around a query and a document"),
    **dict.fromkeys(
        ("chat_control_tokens", "response_template", "response_schema", "use_default_system_prompt"), CHAT
    ),
    **dict.fromkeys(
        ("name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file", "merges_file", "spm_file",
         "is_local", "local_files_only", "files_loaded", "cache_dir", "gguf_file", "_commit_hash", "vocab_size",
         "added_tokens_file", "tokenizer_config_file", "chat_template_file", "subfolder", "revision", "token"),
        LOADING,
    ),
    **dict.fromkeys(("backend", "processor_class", "verbose", "__version__", "transformers_version"), METADATA),
    "auto_map": REMOTE_CODE,
}  # fmt: skip

IN_TEMPLATE = honored("the template has bos_token first, eos_token last; without the other key without that token")
# Arguments of AutoTokenizer.from_pretrained, which tell some keys apart from those of the file.
PROCESSOR_KWARGS: Table = {
    **TOKENIZER_CONFIG,
    **dict.fromkeys(("add_bos_token", "add_eos_token"), IN_TEMPLATE),
    "tokenizer_class": irrelevant("the library takes it from the files only"),
    **dict.fromkeys(
        ("tokenizer_file", "vocab_file", "merges_file", "spm_file", "gguf_file", "vocab", "merges"),
        refused("another vocabulary", None),
    ),
    **dict.fromkeys(("tokenizer_type", "config"), refused("the class of another model", None)),
    "mistral_format": refused("a tekken.json", None, False),
    **dict.fromkeys(("trust_remote_code", "force_download", "proxies", "resume_download", "code_revision"), LOADING),
}

TOKENIZER: Table = {
    "version": METADATA,
    "truncation": honored(
        "its direction, and its max_length for static embeddings; other limits come from the other files"
    ),
    "padding": NO_PADDING,
    "added_tokens": honored("unless tokenizer_config.json has added_tokens_decoder"),
    **dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor"), honored("unless the class replaces it")),
    "decoder": DECODING,
    "model": honored("its vocabulary; its other fields unless the class replaces them"),
}

TOKEN_IDS = irrelevant("the tokenizer's files say it")
DROPOUTS = (
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout", "classifier_dropout_prob",
    "dropout", "embd_pdrop", "embedding_dropout", "emb_pdrop", "hidden_dropout_prob", "mlp_dropout", "qa_dropout",
    "resid_pdrop", "seq_classif_dropout", "summary_first_dropout", "summary_last_dropout", "pooler_dropout",
    "lora_dropout_p", "cls_dropout",
)  # fmt: skip
SHAPE = honored("a shape, under the model_type's own name; the defaults are transformers'")

CAUSAL = refused("a mask of later tokens", False)

# config.json: keys of all model types.
CONFIG: Table = {
    "model_type": honored("which reader and which table of keys apply"),
    "architectures": honored("whether there is a head, and which"),
    "id2label": honored("labels of a classifier"),
    "num_labels": honored("labels of a classifier without id2label"),
    "problem_type": honored("what makes scores of a classifier's logits"),
    "sentence_transformers": honored("activation_fn of a CrossEncoder; version is a description"),
    "sbert_ce_default_activation_function": honored("what makes scores of a CrossEncoder's logits"),
    "vocab_size": SHAPE,
    "max_position_embeddings": SHAPE,
    "tie_word_embeddings": honored("the word table and the decoder are one where the file has only one of them"),
    "is_encoder_decoder": refused("a decoder", False, None),
    "is_decoder": refused("a mask of later tokens", False, None),
    "is_causal": CAUSAL,
    "add_cross_attention": refused("a decoder", False, None),
    "pruned_heads": refused("attention without some heads", None, {}),
    "quantization_config": refused("quantized weights; --dtype int8 quantizes plain ones", None),
    "chunk_size_feed_forward": irrelevant("how much is computed together"),
    **dict.fromkeys(
        ("output_hidden_states", "output_attentions", "return_dict", "use_return_dict", "output_past"), OUTPUT
    ),
    "label2id": irrelevant("id2label says it"),
    **dict.fromkeys(("dtype", "torch_dtype", "use_bfloat16"), DTYPE),
    **dict.fromkeys(
        ("attn_implementation", "_attn_implementation", "_attn_implementation_internal",
         "_attn_implementation_autoset", "use_flash_attn", "use_memory_efficient_attention", "unpad_inputs",
         "torchscript", "fused_bias_fc", "fused_dropout_add_ln", "use_xentropy", "pad_logits",
         "deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"),
        KERNEL,
    ),
    "auto_map": REMOTE_CODE,
    **dict.fromkeys(
        ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "adapter", "directionality",
         "finetuning_task", "language", "model_name", "task_specific_params", "_num_labels", "custom_pipelines",
         "prefix", "license", "matryoshka_dimensions", "model_max_length", "_diffusers_version", "xla_device"),
        METADATA,
    ),
    **dict.fromkeys(
        (*DROPOUTS, "initializer_range", "initializer_cutoff_factor", "gradient_checkpointing", "tf_legacy_loss",
         "layerdrop", "net_structure_type", "residual_in_fp32", "loss_type", "label_smoothing", "mlm_probability",
         "use_recompute", "sparse_prediction", "sparse_pred_ignore_index"),
        TRAINING,
    ),
    **dict.fromkeys(
        ("use_cache", "bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size",
         "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
         "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty",
         "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
         "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
         "suppress_tokens", "temperature", "tie_encoder_decoder", "top_k", "top_p", "typical_p"),
        GENERATION,
    ),
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id", "unk_token_id",
         "pad_token_id", "tokenizer_class"),
        TOKEN_IDS,
    ),
    **dict.fromkeys(
        ("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
         "pooler_type", "summary_activation", "summary_type", "summary_use_proj", "add_pooling_layer"),
        irrelevant("heads of other tasks, which no model_type here has"),
    ),
}  # fmt: skip

SHAPES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
BERT_LIKE: dict[str, Key] = {
    **dict.fromkeys(SHAPES, SHAPE),
    "type_vocab_size": SHAPE,
    "hidden_act": honored("gelu, gelu_new, gelu_pytorch_tanh or relu"),
    "layer_norm_eps": honored("of every norm"),
    "position_embedding_type": honored("absolute, or what the model_type implies"),
    "tokenizer_class": honored("where tokenizer_config.json names no class"),
}
ROBERTA_LIKE: dict[str, Key] = {**BERT_LIKE, "pad_token_id": honored("positions start after its row")}
ROPE = {
    "rope_parameters": honored("rope_theta; rope_type default, linear, dynamic, llama3 or yarn, with their fields"),
    "rope_scaling": honored("the same by version 4's name"),
    "rope_theta": honored("where rope_parameters do not state it"),
    "partial_rotary_factor": honored("1"),
}
JINA_FLASH: dict[str, Key] = {
    "rotary_emb_base": honored("θ of the rotary positions"),
    "lora_adaptations": honored("names of adapters"),
    **dict.fromkeys(("lora_rank", "lora_alpha"), honored("of the adapters")),
    "lora_main_params_trainable": TRAINING,
    "load_trained_adapters": honored("whether there are adapters"),
    "task_instructions": honored("prompts of the adapters"),
    "emb_pooler": honored("null or mean"),
    "truncate_dim": honored("null"),
}
# A `model_type` → its keys in addition to those of CONFIG.
CONFIG_OF_MODEL_TYPE: dict[str, Table] = {
    "bert": {
        **BERT_LIKE,
        "feed_forward_type": honored("JinaBERT v2: original, geglu, reglu"),
    },
    "roberta": ROBERTA_LIKE,
    "camembert": ROBERTA_LIKE,
    "xlm-roberta": {**ROBERTA_LIKE, **JINA_FLASH},
    "jina_embeddings_v3": {
        **ROBERTA_LIKE,
        **JINA_FLASH,
        **ROPE,
        "head_dim": honored("hidden_size / num_attention_heads"),
    },
    "distilbert": {
        **dict.fromkeys(("dim", "n_layers", "n_heads", "hidden_dim"), SHAPE),
        "activation": honored("gelu, gelu_new, gelu_pytorch_tanh or relu"),
        "sinusoidal_pos_embds": irrelevant("how the table of positions was first made; it is stored"),
        "position_embedding_type": honored("absolute"),
        "tokenizer_class": honored("where tokenizer_config.json names no class"),
    },
    "mpnet": {
        **BERT_LIKE,
        "type_vocab_size": irrelevant("this model_type has no token types"),
        "relative_attention_num_buckets": honored("32, which the library's code fixes"),
    },
    "electra": {**BERT_LIKE, "embedding_size": SHAPE},
    "albert": {
        **BERT_LIKE,
        **dict.fromkeys(("embedding_size", "num_hidden_groups", "inner_group_num"), SHAPE),
        **dict.fromkeys(
            ("down_scale_factor", "gap_size", "num_memory_blocks"), irrelevant("never read by the library")
        ),
    },
    "deberta-v2": {
        **BERT_LIKE,
        "embedding_size": SHAPE,
        "type_vocab_size": honored("0: this model has no token types"),
        "relative_attention": honored("whether scores have parts by distance"),
        "pos_att_type": honored("which: c2p, p2c"),
        "max_relative_positions": honored("the distance from which on all share a row; below 1: the longest text"),
        "position_buckets": honored("rows of either side; below 1: one for each distance"),
        "share_att_key": honored("whether keys and queries share their linear layers with positions"),
        "norm_rel_ebd": honored("layer_norm or none"),
        "position_biased_input": honored("whether there is a table of positions"),
        "attention_head_size": honored("hidden_size / num_attention_heads"),
        "conv_kernel_size": honored("0: no convolution"),
        **dict.fromkeys(("conv_act", "conv_groups"), irrelevant("an option of the convolution")),
        "pooler_hidden_size": honored("hidden_size"),
        "pooler_hidden_act": honored("of the classification head"),
        "legacy": honored("which head a masked language model has"),
    },
    "modernbert": {
        **{name: key for name, key in BERT_LIKE.items() if name not in ("hidden_act", "layer_norm_eps")},
        "type_vocab_size": irrelevant("this model_type has no token types"),
        "position_embedding_type": irrelevant("positions are always rotary"),
        "layer_norm_eps": irrelevant("norm_eps says it"),
        "hidden_activation": honored("gelu, gelu_new, gelu_pytorch_tanh or relu"),
        "norm_eps": honored("of every norm"),
        **dict.fromkeys(
            ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias", "decoder_bias"),
            honored("whether these biases exist"),
        ),
        "classifier_activation": honored("of the heads"),
        "classifier_pooling": honored("cls or mean"),
        "global_attn_every_n_layers": honored("version 4: which layers see all tokens"),
        "global_rope_theta": honored("version 4: θ of those layers"),
        "local_rope_theta": honored("version 4: θ of the others"),
        "layer_types": honored("which layers see all tokens"),
        "rope_parameters": honored("rope_theta by the layer's type"),
        "rope_scaling": honored("the default kind"),
        "local_attention": honored("the width of windows"),
        "sliding_window": honored("half of it"),
    },
    "nomic_bert": {
        **BERT_LIKE,
        "hidden_act": honored("silu, gelu, gelu_new, gelu_pytorch_tanh or relu"),
        "head_dim": honored("hidden_size / num_attention_heads"),
        **ROPE,
        # nomic-ai/nomic-bert-2048
        **dict.fromkeys(("n_embd", "n_layer", "n_head", "n_inner", "n_positions"), SHAPE),
        "activation_function": honored("swiglu, geglu or gelu"),
        "layer_norm_epsilon": honored("of every norm"),
        "pad_vocab_size_multiple": honored("rows of the word table are rounded up to it"),
        "num_heads_kv": honored("n_head"),
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), honored("whether these biases exist")),
        **dict.fromkeys(
            ("rotary_emb_base", "rotary_emb_fraction", "rotary_scaling_factor", "max_trained_positions"),
            honored("rotary positions"),
        ),
        **dict.fromkeys(
            ("prenorm", "parallel_block", "causal", "use_rms_norm", "norm_mlp", "rotary_emb_interleaved",
             "rotary_emb_scale_base"),
            honored("the value that leaves it out"),
        ),
        "moe_every_n_layers": honored("one layer in this number has experts; 0: none"),
        "num_experts": honored("experts of such a layer, at most 256"),
        "moe_top_k": honored("experts of each token"),
        **dict.fromkeys(
            ("expert_choice_router", "ffn_div", "moe_normalize_expert_weights", "num_shared_experts"),
            honored("of experts, the value that leaves it out"),
        ),
        **dict.fromkeys(
            ("parallel_block_tied_norm", "moe_impl", "moe_resid_pdrop", "rotary_emb_dim", "reorder_and_upcast_attn"),
            irrelevant("options of what is not read, or never read by its code"),
        ),
        "scale_attn_weights": refused("scores without scaling", True, None),
        "scale_attn_by_inverse_layer_idx": refused("scores scaled by the layer", False, None),
    },
    "gte": {
        **BERT_LIKE,
        "hidden_act": honored("silu, gelu, gelu_new, gelu_pytorch_tanh or relu"),
        "head_dim": honored("hidden_size / num_attention_heads"),
        **ROPE,
        # Alibaba-NLP/new-impl
        "rope_scaling": honored("of this code: ntk; of transformers: as rope_parameters"),
        "layer_norm_type": honored("layer_norm"),
        "logn_attention_scale": honored("false"),
        "pack_qkv": irrelevant("which tensors there are says it"),
        "logn_attention_clip1": irrelevant("an option of logn_attention_scale"),
        "intermediate_size_multiple": irrelevant("never read by its code"),
    },
}  # fmt: skip
BOTH_WAYS_WITH_CODE = honored(
    "true next to auto_map: attention in both directions; without such code transformers ignores it"
)
DECODER: dict[str, Key] = {
    **dict.fromkeys((*SHAPES, "num_key_value_heads", "head_dim"), SHAPE),
    **ROPE,
    "hidden_act": honored("silu, gelu, gelu_new, gelu_pytorch_tanh or relu"),
    "rms_norm_eps": honored("of every norm"),
    "is_causal": honored("false: attention in both directions"),
    "use_bidirectional_attention": BOTH_WAYS_WITH_CODE,
    "pad_token_id": honored("a classifier takes the last token of another id"),
    "token_classification_bias": honored("whether a token classifier has a bias"),
    "tokenizer_class": honored("where tokenizer_config.json names no class"),
    "is_decoder": irrelevant("never read for this model_type"),
    "position_embedding_type": irrelevant("positions are always rotary"),
}
BIASES = {
    "attention_bias": honored("whether attention's linear layers have biases"),
    "mlp_bias": honored("whether those of the feed-forward network have them"),
}
BOTH_WAYS = dict.fromkeys(
    ("is_causal", "use_bidirectional_attention"), irrelevant("attention always has both directions")
)
OF_EUROBERT = {
    "pretraining_tp": irrelevant("products in slices"),
    "hidden_dropout": TRAINING,
    **dict.fromkeys(("bos_token", "eos_token", "mask_token", "pad_token"), TOKEN_IDS),
}
WINDOWS_OF_QWEN = {
    "use_sliding_window": honored("whether there are windows"),
    "sliding_window": honored("tokens of a window"),
    "max_window_layers": honored("the first layer with a window"),
    "layer_types": honored("which layers have a window"),
}
CONFIG_OF_MODEL_TYPE |= {
    "llama": {
        **DECODER,
        **BIASES,
        "pretraining_tp": OF_EUROBERT["pretraining_tp"],
    },
    "eurobert": {
        **DECODER,
        "is_causal": CAUSAL,
        "use_bidirectional_attention": BOTH_WAYS["use_bidirectional_attention"],
        **BIASES,
        "classifier_pooling": honored("late, mean or bos"),
        "clf_pooling": honored("the same as classifier_pooling, by the name of the model's own code"),
        "pad_token_id": TOKEN_IDS,
        **OF_EUROBERT,
    },
    "ultrabert": {
        **DECODER,
        "is_causal": CAUSAL,
        "use_bidirectional_attention": BOTH_WAYS["use_bidirectional_attention"],
        **BIASES,
        "rope_theta": honored("a list with the θ of each layer, where there are no rope_parameters"),
        "attention_windows": honored("a list with the window of each layer, 0 for none"),
        "sliding_window": honored("tokens on each side"),
        "layer_types": honored("which layers have a window"),
        "classifier_pooling": honored("cls or mean"),
        "prediction_head_size": irrelevant("the head of a masked language model, which is not read"),
        "pad_token_id": TOKEN_IDS,
    },
    "mistral": {**DECODER, "sliding_window": honored("tokens of every layer's window; null: all"),
                "layer_types": honored("which layers have a window, as in Ministral")},
    "ministral3": {**DECODER, "sliding_window": honored("tokens of every layer's window; null: all"),
                   "layer_types": irrelevant("sliding_window decides"),
                   **dict.fromkeys(("pooling", "temperature"), irrelevant("modules.json has the pooling"))},
    "mistral3": {
        "text_config": honored("of ministral3 or mistral: its keys are checked by their table"),
        "vision_config": irrelevant("images are not read"),
        "position_embedding_type": irrelevant("positions are always rotary"),
        "pooling": honored("avg: what a classification head takes"),
        "temperature": TRAINING,
        **dict.fromkeys(
            ("image_token_index", "image_token_id", "projector_hidden_act", "vision_feature_layer",
             "multimodal_projector_bias", "spatial_merge_size"),
            irrelevant("images are not read"),
        ),
    },
    "qwen2": {**DECODER, **WINDOWS_OF_QWEN},
    "qwen3": {
        **DECODER,
        **WINDOWS_OF_QWEN,
        "attention_bias": BIASES["attention_bias"],
    },
    "bidirectional_pplx_qwen3": {
        **DECODER,
        **WINDOWS_OF_QWEN,
        **BOTH_WAYS,
        "attention_bias": BIASES["attention_bias"],
    },
    "jina_embeddings_v5": {
        **DECODER,
        **WINDOWS_OF_QWEN,
        **BIASES,
        "is_decoder": honored("false: EuroBERT's layers, as in nano; true: Qwen3's, as in small"),
        "task_names": honored("names of adapters, each in its folder below adapters/"),
        **dict.fromkeys(("classifier_pooling", "clf_pooling"), irrelevant("this model_type has no classes")),
        **OF_EUROBERT,
    },
    "gemma": {
        **DECODER,
        "hidden_act": honored("gelu and gelu_pytorch_tanh: the tanh form; silu, gelu_new or relu"),
        "hidden_activation": irrelevant("hidden_act says it"),
        "attention_bias": BIASES["attention_bias"],
    },
    "gemma3_text": {
        **DECODER,
        "use_bidirectional_attention": honored("true: attention in both directions"),
        "hidden_activation": honored("gelu_pytorch_tanh, silu, gelu, gelu_new or relu"),
        "hidden_act": irrelevant("hidden_activation says it"),
        "attention_bias": BIASES["attention_bias"],
        "query_pre_attn_scalar": honored("scores are divided by its square root"),
        "sliding_window": honored("tokens of a window, half of them on each side where attention has both directions"),
        "sliding_window_pattern": honored("one layer in this number has no window"),
        "_sliding_window_pattern": irrelevant("never read by the library"),
        "layer_types": honored("which layers have a window"),
        "rope_local_base_freq": honored("version 4: θ of the layers with windows"),
        "attn_logit_softcapping": honored("null"),
        "final_logit_softcapping": irrelevant("of the logits of a language model"),
    },
    "embedding_gemma2": {
        "text_config": honored("the following keys but those of images and audio; null: transformers' defaults"),
        **{name: key for name, key in DECODER.items() if name not in ("is_causal", "pad_token_id")},
        **BOTH_WAYS,
        "token_classification_bias": irrelevant("this model_type has no classes"),
        "hidden_activation": honored("gelu_pytorch_tanh, silu, gelu, gelu_new or relu"),
        "hidden_act": irrelevant("hidden_activation says it"),
        "attention_bias": BIASES["attention_bias"],
        "sliding_window": honored("tokens on each side that the layers with windows see"),
        "sliding_window_pattern": honored("one layer in this number has no window"),
        "layer_types": honored("which layers have a window; the last has none"),
        "rope_parameters": honored("rope_theta and rope_type by the layer's type"),
        "hidden_size_per_layer_input": honored("columns of the inputs of layers"),
        "per_layer_config": honored("head_dim and num_key_value_heads of single layers"),
        "global_head_dim": honored("of the layers without windows, where there is no per_layer_config"),
        "num_global_key_value_heads": honored("likewise"),
        "embedding_dim": irrelevant("follows from the weights"),
        **dict.fromkeys(
            ("vision_config", "audio_config", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id",
             "boa_token_id", "eoa_token_index", "audio_token_id"),
            irrelevant("images and audio are not read"),
        ),
    },
    "lfm2": {
        **{name: key for name, key in DECODER.items() if name != "pad_token_id"},
        "is_causal": honored("false: attention in both directions; convolutions see no later row"),
        "token_classification_bias": irrelevant("this model_type has no classes"),
        "norm_eps": honored("of every norm"),
        "layer_types": honored("which layers have attention: full_attention, conv"),
        "full_attn_idxs": honored("the same as numbers of layers, where there are no layer_types; null: all"),
        "conv_L_cache": honored("taps of the convolutions"),
        "conv_bias": honored("whether the linear layers and taps of convolutions have biases"),
        "block_ff_dim": honored("intermediate_size by an older name, which takes precedence"),
        "block_auto_adjust_ff_dim": honored("true: two thirds of intermediate_size, by the next two keys"),
        "block_ffn_dim_multiplier": honored("a factor of intermediate_size"),
        "block_multiple_of": honored("intermediate_size is rounded up to it"),
        "tie_embedding": irrelevant("which tensors there are says it"),
        **dict.fromkeys(
            ("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
             "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc",
             "theta", "hidden_act", "rms_norm_eps"),
            irrelevant("never read by the library"),
        ),
    },
}  # fmt: skip
CONFIG_OF_MODEL_TYPE["new"] = CONFIG_OF_MODEL_TYPE["gte"]

# Keys of Model2Vec 0.10, for folders without modules.json.
CONFIG_OF_MODEL2VEC: Table = {
    "model_type": honored("model2vec"),
    "normalize": honored("the model ends in Normalize"),
    "max_length": honored("the most tokens of a text; null: any number; 512 by default"),
    **dict.fromkeys(
        ("apply_pca", "apply_zipf", "hidden_dim", "pooling", "seq_length", "sif_coefficient", "tokenizer_name"),
        irrelevant("how the table was made"),
    ),
    **dict.fromkeys(("embedding_dtype", "vocabulary_quantization"), irrelevant("follows from the weights")),
    **dict.fromkeys(("architectures", "head_config"), METADATA),
}

# Of the documentation: a heading → its table.
TABLES: dict[str, Table] = {
    "modules.json": MODULES,
    **{f"config.json of {name}": table for name, table in MODULE_CONFIGS.items()},
    "sentence_bert_config.json and its six older names": SENTENCE_BERT_CONFIG,
    "processing_kwargs of sentence_bert_config.json": PROCESSING_KWARGS,
    "config_sentence_transformers.json": CONFIG_SENTENCE_TRANSFORMERS,
    "adapter_config.json": ADAPTER_CONFIG,
    "tokenizer_config.json and special_tokens_map.json": TOKENIZER_CONFIG,
    "processor_kwargs of sentence_bert_config.json": {
        name: key for name, key in PROCESSOR_KWARGS.items() if TOKENIZER_CONFIG.get(name) is not key
    },
    "tokenizer.json": TOKENIZER,
    "config.json of every model": CONFIG,
    **{f"config.json of {name}": table for name, table in CONFIG_OF_MODEL_TYPE.items()},
    "config.json of Model2Vec": CONFIG_OF_MODEL2VEC,
}
