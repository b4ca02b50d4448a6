"""Keys of other tools: tables from a tool's key to the recipe's key.

Error hints and `ortlaunch import` use them. The import converts a value only where `ours` is
nothing but a recipe key. Does not import the recipe's pydantic classes.
"""

from __future__ import annotations

from typing import NamedTuple


class ForeignKey(NamedTuple):
    """The meaning of another tool's key here: the tool's name, and our key or a remedy.

    `ours` begins with the recipe's key, if there is one. `none: why` means that the recipe needs no
    key for it, `no: why` that there is no such thing here.
    """

    tool: str
    recipe_key_or_remedy: str


# Answers that several tools' keys share.
_EPOCHS = "train.epochs"
_PACKED = (
    "none: causal-lm samples of text are always packed (data.attend_across_documents: "
    "attention between them)"
)
_CHATS_PACKED = "data.packing (of chats; text is always packed)"
_RESUME = "the command line option --run-dir with the folder of the run to continue"
_CHECKPOINTING = "model.gradient_checkpointing"
_RAW_ZERO = "zero.stage, and zero.deepspeed for raw settings"
_STREAMS = "none: data is read once and cached"
_QUANTIZED = "model.quantize: {type: nf4} or {type: int8}, beside model.lora"
NO_MODEL_PARALLELISM = (
    "parallel or zero.stage, which divide the model over the ranks (there is no pipeline or "
    "sequence parallelism; parallel.tensor divides layers)"
)
# Names of trainings with preferences or rewards, which other tools have as methods.
PREFERENCES = ("dpo", "kto", "orpo", "simpo", "grpo", "ppo", "rl", "rlhf", "reward")
NO_PREFERENCES = "there is no training with preferences or rewards here; TRL has it"
_STOP_AFTER = "train.stop_after: {metric: loss, evaluations: ...}"
_FASTEST = "none: model.attention chooses the fastest that works"
_SAME_RESULT = "none: evaluation uses batch.micro_size, and its result does not depend on it"
_LOGGER = "none: it is of another logger's account; log.trackers has tensorboard, wandb, mlflow"

# If two tools use one name, FOREIGN keeps the later tool's entry. At present no name is in two
# tables.
DIALECTS: dict[str, dict[str, str]] = {
    "TRL": dict.fromkeys(
        (*PREFERENCES, "chosen_column", "rejected_column", "train.beta", "model.beta"),
        f"no: {NO_PREFERENCES}",
    ),
    "torchtitan": {
        **dict.fromkeys(("parallelism", "distributed"), NO_MODEL_PARALLELISM),
        "tensor": "parallel.tensor",
    },
    "Megatron": {
        "global_batch_size": "batch.global_size",
        "train_iters": "train.max_steps",
        "seq_length": "data.sequence_length",
        "lr_decay_style": "schedule.name",
        "lr_warmup_fraction": "schedule.warmup_ratio",
        "min_lr": "schedule.minimum_ratio (a share of optimizer.learning_rate)",
        "clip_grad": "train.max_grad_norm",
        "save": "checkpoint.every_steps",
        "tensor_model_parallel_size": "parallel.tensor",
        "pipeline_model_parallel_size": NO_MODEL_PARALLELISM,
        "context_parallel_size": NO_MODEL_PARALLELISM,
        "sequence_parallel": NO_MODEL_PARALLELISM,
    },
    "NVIDIA's BERT": {
        "max_predictions_per_seq": "data.masked_lm.max_predictions",
        "warmup_proportion": "schedule.warmup_ratio",
        "num_steps_per_checkpoint": "checkpoint.every_steps",
        "input_dir": "data.train.path",
        "bert_model": "model.config",
        "config_file": "model.config",
        "init_checkpoint": "model.pretrained",
        "vocab_file": "data.tokenizer",
        "phase2": "extends: phase1.yaml in a second recipe",
    },
    "llm-foundry": {
        "global_train_batch_size": "batch.global_size",
        "device_train_microbatch_size": "batch.micro_size",
        "device_eval_batch_size": _SAME_RESULT,
        # A time with its unit, as `10ba` or `1ep`.
        "max_duration": "train.max_steps or train.epochs (a number)",
        "max_seq_len": "data.sequence_length",
        "global_seed": "seed",
        "train_loader": "data.train",
        "eval_loader": "data.evaluation",
        "save_interval": "checkpoint.every_steps",
        "save_num_checkpoints_to_keep": "checkpoint.keep",
        "save_folder": "the command line option --run-dir",
        "load_path": "model.pretrained, or --run-dir to continue a run",
        "eval_interval": "train.evaluate_every_steps",
        "t_warmup": "schedule.warmup_steps",
        "fsdp_config": "parallel (FSDP2), or zero.stage",
        "loggers": "log.trackers",
        "algorithms": "train.max_grad_norm (for gradient_clipping; other algorithms have no place here)",
        "callbacks": "none: speed and memory are always recorded",
        "optimizers": "optimizer",
    },
    "torchtune": {
        "batch_size": "batch.micro_size (samples of one forward pass) or batch.global_size (samples of a "
        "step)",
        "epochs": _EPOCHS,
        "_component_": "none: components are chosen by name, as in optimizer.name",
        "max_steps_per_epoch": "train.max_steps",
        "batch_size_val": _SAME_RESULT,
        "run_val_every_n_steps": "train.evaluate_every_steps",
        "device": "launch.device",
        "log_peak_memory_stats": "none: memory is always recorded",
        "optimizer_in_bwd": "none: the update is the same; it saves memory",
        "low_cpu_ram": "none: weights are read into the model's own memory",
        "collate_fn": "none: the task has its own",
        "tensor_parallel_dim": "parallel.tensor",
        "data_parallel_replicate_dim": "parallel.replicate",
        "data_parallel_shard_dim": "parallel.shard",
        "save_adapter_weights_only": "model.lora.merge: false",
        "enable_activation_offloading": "model.offload_activations",
        "checkpointer": "checkpoint, and model.pretrained for the initial weights",
        "dtype": "precision",
        "loss": "none: the model's task sets the loss",
        "metric_logger": "log.trackers",
        "log_every_n_steps": "log.every_steps",
        "clip_grad_norm": "train.max_grad_norm",
        "compile": "engine.name: inductor",
        "num_warmup_steps": "schedule.warmup_steps",
        "enable_activation_checkpointing": _CHECKPOINTING,
        "lora_attn_modules": "model.lora.target_modules",
        "shuffle": "none: samples are always shuffled, by seed",
        "log_level": "none: it is of torchtune's own lines",
    },
    "NeMo AutoModel": {
        "step_scheduler": "batch, checkpoint and train",
        "lr_scheduler": "schedule",
        "local_batch_size": "batch.micro_size",
        "packed_sequence_size": _CHATS_PACKED,
    },
    "Oumi": {
        "model_max_length": "data.sequence_length",
        "torch_dtype_str": "precision",
        "enable_gradient_checkpointing": _CHECKPOINTING,
    },
    "DeepSpeed": {
        "train_batch_size": "batch.global_size",
        "train_micro_batch_size_per_gpu": "batch.micro_size",
        "gradient_clipping": "train.max_grad_norm",
        "zero_optimization": _RAW_ZERO,
        "steps_per_print": "log.every_steps",
        "scheduler": "schedule",
        "scheduler.params": "schedule",
        "zero_stage": "zero.stage",
        "tensor_parallel": "parallel.tensor",
        "autotp_size": "parallel.tensor",
        "num_gpus": "launch.processes_per_node",
        "num_nodes": "launch.nodes",
        "hostfile": "the command line option --hostfile",
        # DeepSpeed's JSON puts settings under `params`. The recipe does not.
        "optimizer.type": "optimizer.name",
        "optimizer.params": "none: settings are directly in `optimizer`",
        "schedule.type": "schedule.name",
        "schedule.params": "none: settings are directly in `schedule`",
        "schedule.warmup_num_steps": "schedule.warmup_steps",
        "schedule.total_num_steps": "train.max_steps",
        "schedule.warmup_max_lr": "optimizer.learning_rate",
    },
    "Axolotl": {
        "base_model": "model.pretrained",
        "datasets": "data.train",
        "test_datasets": "data.evaluation",
        "micro_batch_size": "batch.micro_size",
        "num_epochs": _EPOCHS,
        "sequence_len": "data.sequence_length",
        "sample_packing": _CHATS_PACKED,
        "pad_to_sequence_len": _PACKED,
        "lr_scheduler": "schedule.name",
        "adapter": "model.lora",
        "lora_r": "model.lora.r",
        "lora_dropout": "model.lora.dropout",
        "lora_target_modules": "model.lora.target_modules",
        "lora_target_linear": "model.lora.target_modules",
        "load_in_8bit": _QUANTIZED,
        "load_in_4bit": _QUANTIZED,
        "flash_attention": _FASTEST,
        "xformers_attention": _FASTEST,
        "val_set_size": "data.evaluation: {share: 0.05} or {samples: 500}",
        "evals_per_epoch": "train.evaluate_every_epochs (a part of an epoch: 1 / evals_per_epoch)",
        "saves_per_epoch": "checkpoint.every_epochs (a part of an epoch: 1 / saves_per_epoch)",
        "wandb_project": "log.project (and wandb in log.trackers)",
        "dataset_prepared_path": "none: prepared data is always cached",
        "tokenizer_type": "none: the tokenizer's files define it",
        "is_llama_derived_model": "none: the model's config defines it",
        "wandb_entity": "none: W&B reads it from WANDB_ENTITY",
        "dataset_processes": "none: text is always tokenized in parallel",
        "auto_resume_from_checkpoints": "none: a run continues by itself in the folder of --run-dir",
        "use_ray": "none: ortlaunch starts the processes",
        "ray_num_workers": "launch.processes_per_node",
        "cosine_constant_lr_ratio": "schedule.decay_ratio (with schedule.name wsd)",
        "base_model_ignore_patterns": "none: only the weights that the model needs are fetched",
        "max_packed_sequence_len": "none: Axolotl itself reads no such key any more",
        "cosine_min_lr_ratio": "schedule.minimum_ratio",
        "special_tokens": "data.special_tokens",
        "tokens": "data.added_tokens",
        "train_on_inputs": "data.train.train_on: all",
        "chat_template_kwargs": "data.template_arguments",
        "field_tools": "data.train.tools_column",
        "loss_watchdog_threshold": "train.on_spike: {limit: ...}",
        "loss_watchdog_patience": "train.on_spike: {patience: ...}",
        "use_tensorboard": "log.trackers: [tensorboard]",
        "use_mlflow": "log.trackers: [mlflow]",
        "mlflow_experiment_name": "log.project",
        "sequence_parallel_degree": NO_MODEL_PARALLELISM,
        "tensor_parallel_size": "parallel.tensor",
        "context_parallel_size": NO_MODEL_PARALLELISM,
        "expert_parallel_size": NO_MODEL_PARALLELISM,
        "dp_replicate_size": "parallel.replicate",
        "dp_shard_size": "parallel.shard",
        "eval_batch_size": _SAME_RESULT,
        "ddp_find_unused_parameters": "none: parameters without a gradient are detected",
        "lora_fan_in_fan_out": "none: peft detects it",
        "lora_modules_to_save": "model.lora.modules_to_save",
        "lora_target_parameters": "model.lora.target_parameters",
        "unfrozen_parameters": "model.freeze (with exceptions, as ['*', '!lm_head*'])",
        "model_config": "model.config",
        "overrides_of_model_config": "model.config",
        "shuffle_merged_datasets": "none: the samples of all sources are shuffled together",
        "tokenizer_use_fast": "none: it is always the fast one",
        "tokenizer_legacy": "none: the tokenizer's files define it",
        "activation_offloading": "model.offload_activations",
        "hf_use_auth_token": "none: HF_TOKEN, or the login of the hub's own command, is used",
        "low_cpu_mem_usage": "none: weights are read into the model's own memory",
        "device_map": "none: each rank has its device",
        "resize_token_embeddings_to_32x": "none: it rounds the word table's size up, for speed alone",
        "eta_min": "none: Axolotl itself reads no such key",
        "adam_eps": "none: Axolotl itself reads no such key",
        "streaming_multipack_buffer_size": "none: text is packed without a buffer",
        **dict.fromkeys(
            (
                *("use_swanlab", "swanlab_project", "swanlab_experiment_name", "swanlab_mode"),
                *("swanlab_description", "swanlab_workspace", "swanlab_api_key"),
                *("use_comet", "comet_workspace", "comet_project_name"),
                *("use_trackio", "trackio_project_name", "trackio_run_name"),
                *("use_otel_metrics", "otel_metrics_host", "otel_metrics_port"),
            ),
            _LOGGER,
        ),
    },
    "LLaMA-Factory": {
        "model_name_or_path": "model.pretrained",
        "tokenizer_name": "data.tokenizer",
        "dataset": "data.train",
        "dataset_dir": "data.train.path",
        "cutoff_len": "data.sequence_length",
        "packing": _CHATS_PACKED,
        "neat_packing": "data.packing (of text: data.attend_across_documents: false)",
        # LLaMA-Factory's `stage` is pt, sft and others. A user may also mean ZeRO's stage.
        "stage": "model.task (for ZeRO's stage: zero.stage)",
        "finetuning_type": "model.lora (leave it out to train all weights)",
        "lora_rank": "model.lora.r",
        "lora_alpha": "model.lora.alpha",
        "lora_target": "model.lora.target_modules",
        "flash_attn": "model.attention",
        "val_size": "data.evaluation: {share: 0.05} or {samples: 500}",
        "streaming": "data.train.stream",
        "overwrite_cache": _STREAMS,
        "template": "data.chat_template (Jinja; null: the tokenizer's own)",
        "plot_loss": "none: `ortlaunch report` draws it",
        "train_on_prompt": "data.train.train_on: all",
        "enable_thinking": "data.template_arguments: {enable_thinking: false}",
        "mask_history": "data.train.train_on: last",
        "max_samples": "data.train.most_rows",
        "eval_dataset": "data.evaluation",
        "quantization_bit": _QUANTIZED,
        "quant_config": _QUANTIZED,
        "tokenized_path": "none: prepared data is always cached",
        "sample_backend": "none: `ortlaunch generate` uses transformers",
        "max_new_tokens": "none: `ortlaunch generate` has it",
        "init_config": "none: weights are read into the model's own memory",
        "model_class": "none: the task defines it",
        "disable_gradient_checkpointing": "model.gradient_checkpointing: false",
        "pure_bf16": "precision: bf16",
        "tensor_model_parallel_size": "parallel.tensor",
        "pipeline_model_parallel_size": NO_MODEL_PARALLELISM,
        "context_parallel_size": NO_MODEL_PARALLELISM,
        "expert_model_parallel_size": NO_MODEL_PARALLELISM,
        "cp_size": NO_MODEL_PARALLELISM,
        "early_stopping_steps": _STOP_AFTER,
    },
    "Hugging Face": {
        "early_stopping_patience": _STOP_AFTER,
        "patience": _STOP_AFTER,
        "train.patience": _STOP_AFTER,
        "model.loss": "no: no loss has a name here: a model of your own (model.factory) returns its loss, and "
        "ORTTrainer takes compute_loss_func (`ortlaunch docs optimum`)",
        "output_dir": "the command line option --run-dir",
        "per_device_train_batch_size": "batch.micro_size",
        "per_device_eval_batch_size": _SAME_RESULT,
        "gradient_accumulation_steps": "batch.accumulation_steps",
        "num_train_epochs": _EPOCHS,
        "lr": "optimizer.learning_rate",
        "lr_scheduler_type": "schedule.name",
        "lr_scheduler_kwargs": "schedule.power, schedule.minimum_ratio or schedule.decay_ratio",
        "min_lr_rate": "schedule.minimum_ratio",
        "adam_beta1": "optimizer.betas (a pair)",
        "adam_beta2": "optimizer.betas (a pair)",
        "adam_epsilon": "optimizer.epsilon",
        "optim": "optimizer.name",
        "fp16": "precision: fp16",
        "bf16": "precision: bf16",
        "tf32": "engine.matmul_precision: high",
        "logging_steps": "log.every_steps",
        "logging_dir": "none: TensorBoard files are in the run folder",
        "save_steps": "checkpoint.every_steps",
        "save_only_model": "none: checkpoints have the optimizer's state, too",
        "save_strategy": "checkpoint.every_steps or checkpoint.every_epochs",
        "save_total_limit": "checkpoint.keep",
        "resume_from_checkpoint": _RESUME,
        "data_seed": "seed",
        "deepspeed": _RAW_ZERO,
        "fsdp": "parallel (FSDP2), or zero.stage",
        "report_to": "log.trackers",
        "run_name": "name",
        "eval_strategy": "train.evaluate_every_steps or train.evaluate_every_epochs",
        "evaluation_strategy": "train.evaluate_every_steps or train.evaluate_every_epochs",
        "eval_steps": "train.evaluate_every_steps",
        "attn_implementation": "model.attention",
        "torch_dtype": "precision",
        "torch_compile": "engine.name: inductor",
        "do_train": "none: `ortlaunch train` always trains",
        "do_eval": "data.evaluation (a corpus, or {share: 0.05} of data.train)",
        "train_file": "data.train.path",
        "validation_split_percentage": "data.evaluation: {share: 0.05}",
        "validation_file": "data.evaluation.path",
        "dataset_name": "data.train.name (with format: hub)",
        "dataset_config_name": "data.train.subset (with format: hub)",
        "max_seq_length": "data.sequence_length",
        "max_length": "data.sequence_length",
        "block_size": "data.sequence_length",
        "mlm_probability": "data.masked_lm.probability",
        "overwrite_output_dir": "none: a run folder is never overwritten",
        "gradient_checkpointing_kwargs": "none: it is transformers' own, not reentrant",
        "preprocessing_num_workers": "none: text is always tokenized in parallel",
        "dataset_num_proc": "none: text is always tokenized in parallel",
        "label_all_tokens": "data.label_pieces: all",
        "pad_to_max_length": "data.padding: fixed",
        "use_fast_tokenizer": "none: it is always the fast one",
        "trust_remote_code": "none: code of a model's folder is never run; a model that needs it cannot be trained",
        "cache_dir": "none: HF_HOME is the folder of the hub's files",
        "remove_unused_columns": "none: other columns are not read",
        "disable_tqdm": "none: a line is printed each log.every_steps",
        "logging_first_step": "none: lines are by log.every_steps",
        "logging_strategy": "none: lines are by log.every_steps",
        "dataloader_pin_memory": "none: it is always so on CUDA",
        "ddp_timeout": "none: train.stall_seconds is set by itself",
        "push_to_hub": "none: `ortlaunch export RUN --push REPO` does it",
        "hub_strategy": "none: `ortlaunch export RUN --push REPO` does it",
        "hub_model_id": "none: `ortlaunch export RUN --push REPO` does it",
        "model_revision": "model.pretrained (a local folder of that revision; from the hub the newest is "
        "used)",
        "ddp_backend": "launch.device (cuda uses NCCL, cpu gloo)",
        "dataloader_num_workers": "data.workers",
        "group_by_length": "data.padding: longest",
        "auto_find_batch_size": "batch.micro_size: auto (with batch.global_size)",
        "use_cpu": "launch.device: cpu",
        "no_cuda": "launch.device: cpu",
        "average_tokens_across_devices": "none: a step's loss is the mean over all its labels",
        "logging_nan_inf_filter": "none: train.on_nonfinite determines what a bad loss does",
        "include_num_input_tokens_seen": "none: samples and tokens a second are always recorded",
        "log_on_each_node": "none: each rank has a log of its own",
        "log_level_replica": "none: each rank has a log of its own",
        "dataloader_in_order": "none: samples are always in the same order",
        "dataloader_drop_last": "none: the rest of an epoch fills steps of the next",
        "train_sampling_strategy": "none: samples are always shuffled, by seed",
        "length_column_name": "none: lengths are counted",
        "eval_do_concat_batches": "none: metrics are summed as batches come",
        "skip_memory_metrics": "none: memory is always recorded",
        "local_rank": "none: the launcher sets it",
        "hub_token": "none: HF_TOKEN, or the login of the hub's own command, is used",
        "mixed_precision": "precision",
        "num_processes": "launch.processes_per_node",
        "num_machines": "launch.nodes",
        "model.lora.rank": "model.lora.r",
        "model.lora.lora_rank": "model.lora.r",
    },
    "Kubernetes": {
        f"submit.kubernetes.{name}": "submit.kubernetes.pod, with this field"
        for name in (
            *("tolerations", "affinity", "securityContext", "imagePullSecrets", "schedulerName"),
            *("priorityClassName", "hostNetwork", "initContainers", "containers"),
        )
    },
    "accelerate": {
        **dict.fromkeys(
            (
                *("compute_environment", "distributed_type", "machine_rank", "rdzv_backend"),
                *("main_training_function", "same_network", "downcast_bf16", "main_process_ip"),
                *("main_process_port", "enable_cpu_affinity", "gpu_ids"),
            ),
            "none: the launcher determines it",
        ),
    },
    "torchrun": {
        "nproc_per_node": "launch.processes_per_node",
        "nnodes": "launch.nodes",
    },
    "vLLM": {
        "tensor_parallel_size": "parallel.tensor",
        "pipeline_parallel_size": NO_MODEL_PARALLELISM,
    },
    "Slurm": {
        "ntasks_per_node": "launch.processes_per_node",
        "gpus_per_node": "launch.processes_per_node",
        "ntasks": "launch.nodes and launch.processes_per_node",
        "gres": "submit.gpus: gres",
        "job_name": "name",
        **{
            name: f"submit.{name}"
            for name in ("partition", "account", "qos", "constraint", "reservation")
        },
        **{
            f"launch.{name}": f"submit.{name}"
            for name in ("time", "cpus_per_task", "nodelist", "exclusive")
        },
        "launch.mem": "submit.memory",
        "launch.queue": "submit.partition",
        "walltime": "submit.time",
        "launch.array": "none: submit each run with its overrides",
    },
    "PyTorch": {
        "resume": _RESUME,
        "optimizer.eps": "optimizer.epsilon",
        "optimizer.beta1": "optimizer.betas (a pair)",
        "optimizer.beta2": "optimizer.betas (a pair)",
        "optimizer.lr_scheduler": "schedule.name",
        "warmup": "schedule.warmup_steps",
        "steps": "train.max_steps",
        "gpus": "launch.processes_per_node",
        "world_size": "launch.nodes and launch.processes_per_node",
        "backend": "engine.name",
        "ddp": "none: without zero and parallel it is DistributedDataParallel",
        "fsdp2": "parallel",
        "fsdp_version": "parallel (FSDP2)",
        "hsdp": "parallel (shard, and replicate for the copies)",
        "mesh": "parallel (replicate, shard, tensor)",
        "device_mesh": "parallel (replicate, shard, tensor)",
        **dict.fromkeys(("tp", "tp_size"), "parallel.tensor"),
        "peft": "model.lora",
        **dict.fromkeys(("quantization", "quantize", "qlora"), _QUANTIZED),
    },
    "Hydra": {
        "defaults": "extends",
        "_base_": "extends",
        "include": "extends",
        "inherits": "extends",
        "inherit": "extends",
    },
}

# Keys without a counterpart -> their defaults, of transformers' TrainingArguments.
USUAL = {
    "label_smoothing_factor": 0.0,
    "eval_delay": 0,
    "accelerator_config": {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": True,
        "non_blocking": False,
        "gradient_accumulation_kwargs": None,
    },
}
# Keys that are true by default in the other tools -> what is done here in any case.
TRUE_BY_ITSELF = {
    "average_tokens_across_devices": "a step's loss is the mean over all its labels",
    "shuffle": "samples are shuffled, by seed",
    "shuffle_merged_datasets": "the samples of all sources are shuffled together",
    "shuffle_dataset": "samples are shuffled, by seed",
    "remove_unused_columns": "other columns are not read",
    "dataloader_in_order": "samples are always in the same order",
    "logging_nan_inf_filter": "a loss that is not finite is never left out of a mean",
    "bias_correction": "Adam corrects the bias of its averages",
}

# A key with a dot, as `optimizer.eps`, is foreign only in the section before the dot.
FOREIGN: dict[str, ForeignKey] = {
    key: ForeignKey(tool, ours) for tool, keys in DIALECTS.items() for key, ours in keys.items()
}
