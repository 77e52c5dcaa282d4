"""Tiny trace files of every format."""

import gzip
from pathlib import Path

PLAIN = """\
arrived_at,num_prefill_tokens,num_decode_tokens
0.5,100,10
1.0,200,20
1.0,300,30
3.5,400,40
"""
LENGTHS = """\
num_prefill_tokens,num_decode_tokens,pd_ratio
100,10,10.0
200,20,10.0
300,30,10.0
"""
AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
BURSTGPT = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,a,43,GPT-4,906,446,1352,Conversation log
19440161.0,b,2,ChatGPT,36,29,65,Conversation log
19440192.0,a,9,GPT-4,50,0,50,API log
19440200.0,c,9,GPT-4,70,8,78,API log
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 250, "input_length": 1000, "output_length": 6, "hash_ids": [0, 3]}
{"timestamp": 3000, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 4]}
"""
BAILIAN = """\
{"chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40, "output_length": 5, "type": "text", "turn": 1, "hash_ids": [1, 2, 3]}
{"chat_id": 8, "parent_chat_id": -1, "timestamp": 2.0, "input_length": 16, "output_length": 6, "type": "search", "turn": 1, "hash_ids": [9]}
{"chat_id": 9, "parent_chat_id": 7, "timestamp": 3.0, "input_length": 64, "output_length": 7, "type": "text", "turn": 2, "hash_ids": [1, 2, 4, 5]}
{"chat_id": 6, "parent_chat_id": 7, "timestamp": 9.0, "input_length": 48, "output_length": 8, "type": "text", "turn": 2, "hash_ids": [1, 2, 6]}
"""  # noqa: E501
TURNS = """\
{"session_id": "a", "timestamp": 0, "input_length": 100, "output_length": 10}
{"session_id": "b", "timestamp": 500, "input_length": 50, "output_length": 5}
{"session_id": "a", "timestamp": 4000, "input_length": 130, "output_length": 10}
{"session_id": "a", "timestamp": 9000, "input_length": 60, "output_length": 10}
"""
SHAREGPT = """\
[
 {"id": "x", "conversations": [{"from": "human", "value": "one two three"},
                               {"from": "gpt", "value": "four five"}]},
 {"id": "y", "conversations": [{"from": "human", "value": "alone"}]},
 {"id": "z", "conversations": [{"from": "human", "value": "a b"},
                               {"from": "gpt", "value": "c d e f"},
                               {"from": "human", "value": "g"}]}
]
"""
AGENTS = """\
{"id": "x", "block_size": 64, "hash_id_scope": "local", "requests": [
 {"t": 0, "type": "n", "in": 100, "out": 5, "hash_ids": [1]},
 {"t": 9, "type": "s", "in": 130, "out": 5, "hash_ids": [1, 2]},
 {"t": 14, "type": "n", "in": 140, "out": 5, "hash_ids": [1, 2]}
]}
"""
EVERY = {
    "plain": PLAIN,
    "lengths": LENGTHS,
    "azure": AZURE_2023,
    "burstgpt": BURSTGPT,
    "mooncake": MOONCAKE,
    "bailian": BAILIAN,
    "turns": TURNS,
    "sharegpt": SHAREGPT,
}


def packed(folder: Path, text: str, name: str = "trace.csv.gz") -> str:
    """The path of a gzip file with this text."""
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()))
    return str(path)


def written(folder: Path, text: str, name: str = "trace.csv") -> str:
    """The path of a file with this text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)
