"""The Triton model repository, installed as dflash_trt.triton_model_repo."""
