from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True)
class Specialisation:
    """What a module of kernels is compiled for."""

    target_dtype: str
    draft_dtype: str
    token_dtype: str
    rule: str
    segment: int
    @property
    def defines(self):
        t = {"float32": "float", "float16": "Half", "bfloat16": "BFloat16", "int32":"int","int64":"long long"}
        return (f"-DTARGET_TYPE={t[self.target_dtype]}", f"-DDRAFT_TYPE={t[self.draft_dtype]}", f"-DTOKEN_TYPE={t[self.token_dtype]}", f"-DCHAIN_RULE=RULE_{self.rule.upper()}", f"-DSEGMENT={self.segment}")
