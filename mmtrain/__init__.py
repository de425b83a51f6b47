"""mmtrain: plan and train multimodal LLMs, from one laptop core to thousands of GPUs."""

__version__ = "0.1.0"
