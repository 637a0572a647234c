# SPDX-License-Identifier: Apache-2.0
"""Small PTX modules for the behaviour tests."""

from __future__ import annotations


def kernel(
    body: str,
    *,
    params: str = ".param .u64 p0, .param .u64 p1",
    directives: str = "",
    module: str = "",
    target: str = "sm_100a",
    version: str = "9.0",
) -> str:
    """A module with one kernel ``k``; %p0/%p1 hold the first two parameters, %lane is tid.x, %g the
    global thread index of a 1-D launch. Registers: %r 32-bit, %d 64-bit, %f 32-bit, %h 16-bit, %q
    predicates."""
    count = params.count(".param")
    loads = "\n".join(f"ld.param.u64 %p{k}, [p{k}];" for k in range(min(count, 2)))
    return f""".version {version}
.target {target}
.address_size 64
{module}
.visible .entry k({params}) {directives}
{{
.reg .b64 %p<4>;
.reg .b64 %d<32>;
.reg .b32 %r<64>;
.reg .b32 %f<32>;
.reg .b16 %h<16>;
.reg .pred %q<16>;
.reg .b32 %lane, %cta, %ntid, %g;
{loads}
mov.u32 %lane, %tid.x;
mov.u32 %cta, %ctaid.x;
mov.u32 %ntid, %ntid.x;
mad.lo.u32 %g, %cta, %ntid, %lane;
{body}
ret;
}}
"""


STORE_R0 = "mad.wide.u32 %d31, %g, 4, %p0;\nst.global.u32 [%d31], %r0;"


def wait(address: str, parity: str, label: str) -> str:
    """Spin on mbarrier.try_wait.parity."""
    return f"""
{label}:
mbarrier.try_wait.parity.shared::cta.b64 %q15, [{address}], {parity};
@!%q15 bra {label};
"""
