//! Single instructions against values that follow from the PTX manual.
//!
//! Each case is an instruction and its operands' bits. Registers 1 to 3 of every class hold the operands, cut to the size
//! of the class; register 0 takes the result.

use crate::support::Device;
use crate::support::Parameter::Address;

/// Bits of f32 numbers.
const fn f(value: f32) -> u64 {
    value.to_bits() as u64
}

/// Bits of f64 numbers.
const fn d(value: f64) -> u64 {
    value.to_bits()
}

/// Bits of signed integers of 32 bits.
const fn s(value: i32) -> u64 {
    value as u32 as u64
}

const NAN: u64 = f(f32::NAN);
const INFINITY: u64 = f(f32::INFINITY);
/// The smallest number that is not subnormal, halved.
const SUBNORMAL: u64 = 0x0040_0000;
const BF16_ONE: u64 = 0x3f80;
const HALF_ONE: u64 = 0x3c00;

/// Instruction, operands, result.
const INTEGERS: &[(&str, [u64; 3], u64)] = &[
    ("add.u32 %r0, %r1, %r2", [0xffff_ffff, 2, 0], 1),
    ("add.s16 %rs0, %rs1, %rs2", [0x7fff, 1, 0], 0x8000),
    ("sub.s64 %rd0, %rd1, %rd2", [1, 2, 0], u64::MAX),
    ("mul.lo.s32 %r0, %r1, %r2", [s(-3), 7, 0], s(-21)),
    ("mul.hi.u32 %r0, %r1, %r2", [0x8000_0000, 6, 0], 3),
    ("mul.hi.s32 %r0, %r1, %r2", [s(-1), 6, 0], s(-1)),
    ("mul.hi.u64 %rd0, %rd1, %rd2", [1 << 63, 6, 0], 3),
    ("mul.wide.s32 %rd0, %r1, %r2", [s(-3), 7, 0], (-21i64) as u64),
    ("mul.wide.u32 %rd0, %r1, %r2", [0xffff_ffff, 2, 0], 0x1_ffff_fffe),
    ("mul.wide.u16 %r0, %rs1, %rs2", [0xffff, 0xffff, 0], 0xfffe_0001),
    ("mad.lo.s32 %r0, %r1, %r2, %r3", [s(-3), 7, 1], s(-20)),
    ("mad.wide.u32 %rd0, %r1, %r2, %rd3", [0xffff_ffff, 2, 2], 0x2_0000_0000),
    ("div.s32 %r0, %r1, %r2", [s(-7), 2, 0], s(-3)),
    ("div.u32 %r0, %r1, %r2", [s(-7), 2, 0], 0x7fff_fffc),
    ("rem.s32 %r0, %r1, %r2", [s(-7), 2, 0], s(-1)),
    ("rem.u64 %rd0, %rd1, %rd2", [u64::MAX, 10, 0], 5),
    ("min.s32 %r0, %r1, %r2", [s(-7), 2, 0], s(-7)),
    ("min.u32 %r0, %r1, %r2", [s(-7), 2, 0], 2),
    ("max.s64 %rd0, %rd1, %rd2", [u64::MAX, 2, 0], 2),
    ("neg.s32 %r0, %r1", [5, 0, 0], s(-5)),
    ("abs.s32 %r0, %r1", [s(-5), 0, 0], 5),
    ("sad.u32 %r0, %r1, %r2, %r3", [3, 9, 100], 106),
    ("and.b32 %r0, %r1, %r2", [0b1100, 0b1010, 0], 0b1000),
    ("or.b64 %rd0, %rd1, %rd2", [0b1100, 1 << 40, 0], 1 << 40 | 0b1100),
    ("not.b32 %r0, %r1", [0xff, 0, 0], 0xffff_ff00),
    ("lop3.b32 %r0, %r1, %r2, %r3, 0x96", [0b1100, 0b1010, 0b0110], 0),
    ("shl.b32 %r0, %r1, %r2", [3, 31, 0], 0x8000_0000),
    ("shl.b32 %r0, %r1, %r2", [3, 32, 0], 0),
    ("shl.b64 %rd0, %rd1, %r2", [3, 40, 0], 3 << 40),
    ("shr.s32 %r0, %r1, %r2", [s(-8), 40, 0], s(-1)),
    ("shr.u32 %r0, %r1, %r2", [s(-8), 28, 0], 15),
    ("shr.u64 %rd0, %rd1, 32", [5 << 32, 0, 0], 5),
    ("shf.l.wrap.b32 %r0, %r1, %r2, %r3", [0x8000_0000, 1, 33], 3),
    ("shf.r.clamp.b32 %r0, %r1, %r2, %r3", [1, 5, 40], 5),
    ("bfe.u32 %r0, %r1, %r2, %r3", [0xabcd, 4, 8], 0xbc),
    ("bfe.s32 %r0, %r1, %r2, %r3", [0xabcd, 4, 8], s(-68)),
    ("bfi.b32 %r0, %r1, %r2, 8, 4", [0xff, 0, 0], 0xf00),
    ("bfi.b64 %rd0, %rd1, %rd2, 32, 32", [7, 5, 0], 7 << 32 | 5),
    ("brev.b32 %r0, %r1", [1, 0, 0], 0x8000_0000),
    ("popc.b64 %r0, %rd1", [u64::MAX, 0, 0], 64),
    ("clz.b32 %r0, %r1", [0x00ff_0000, 0, 0], 8),
    ("bfind.u32 %r0, %r1", [0x00ff_0000, 0, 0], 23),
    ("bfind.u32 %r0, %r1", [0, 0, 0], 0xffff_ffff),
    ("bfind.shiftamt.u32 %r0, %r1", [0x00ff_0000, 0, 0], 8),
    ("prmt.b32 %r0, %r1, %r2, 0x5410", [0x3322_1100, 0x7766_5544, 0], 0x5544_1100),
    ("mov.b64 %rd0, {%r1, %r2}", [5, 7, 0], 7 << 32 | 5),
    ("mov.b32 %r0, {%rs1, %rs2}", [5, 7, 0], 7 << 16 | 5),
    ("selp.b32 %r0, %r1, %r2, %p1", [5, 7, 0], 5),
    ("set.eq.u32.u32 %r0, %r1, %r2", [5, 5, 0], 0xffff_ffff),
];

const FLOATS: &[(&str, [u64; 3], u64)] = &[
    ("add.f32 %f0, %f1, %f2", [f(1.5), f(-4.0), 0], f(-2.5)),
    ("add.ftz.f32 %f0, %f1, %f2", [SUBNORMAL, SUBNORMAL, 0], 0),
    ("add.f32 %f0, %f1, %f2", [SUBNORMAL, SUBNORMAL, 0], 0x0080_0000),
    ("add.sat.f32 %f0, %f1, %f2", [f(1.5), f(4.0), 0], f(1.0)),
    (
        "fma.rn.f32 %f0, %f1, %f2, %f3",
        [f(1.0 + f32::EPSILON), f(1.0 - f32::EPSILON), f(-1.0)],
        f(-f32::EPSILON * f32::EPSILON),
    ),
    ("fma.rm.f32 %f0, %f1, %f2, %f3", [f(1.0), f(1.0), f(1e-20)], f(1.0)),
    ("fma.rp.f32 %f0, %f1, %f2, %f3", [f(1.0), f(1.0), f(1e-20)], f(1.0 + f32::EPSILON)),
    ("add.rz.f32 %f0, %f1, %f2", [f(-1.0), f(1e-20), 0], 0xbf7f_ffff),
    ("div.rn.f32 %f0, %f1, %f2", [f(1.0), f(3.0), 0], f(1.0 / 3.0)),
    ("rcp.rn.f32 %f0, %f1", [f(3.0), 0, 0], f(1.0 / 3.0)),
    ("sqrt.rn.f32 %f0, %f1", [f(2.0), 0, 0], f(std::f32::consts::SQRT_2)),
    ("rsqrt.approx.f32 %f0, %f1", [f(4.0), 0, 0], f(0.5)),
    ("ex2.approx.f32 %f0, %f1", [f(-3.0), 0, 0], f(0.125)),
    ("lg2.approx.f32 %f0, %f1", [f(8.0), 0, 0], f(3.0)),
    ("max.f32 %f0, %f1, %f2", [NAN, f(2.0), 0], f(2.0)),
    ("min.f32 %f0, %f1, %f2", [f(0.0), f(-0.0), 0], f(-0.0)),
    ("max.f32 %f0, %f1, %f2", [f(-0.0), f(0.0), 0], f(0.0)),
    ("neg.f32 %f0, %f1", [f(2.0), 0, 0], f(-2.0)),
    ("abs.f32 %f0, %f1", [f(-2.0), 0, 0], f(2.0)),
    ("copysign.f32 %f0, %f1, %f2", [f(-1.0), f(2.0), 0], f(-2.0)),
    ("fma.rn.f64 %fd0, %fd1, %fd2, %fd3", [d(3.0), d(4.0), d(0.5)], d(12.5)),
    ("sqrt.rn.f64 %fd0, %fd1", [d(9.0), 0, 0], d(3.0)),
    ("add.bf16 %rs0, %rs1, %rs2", [BF16_ONE, BF16_ONE, 0], 0x4000),
    ("fma.rn.bf16x2 %r0, %r1, %r2, %r3", [0x4000_3f80, 0x4000_4000, 0x3f80_3f80], 0x40a0_4040),
    ("mul.f16 %rs0, %rs1, %rs2", [0x4000, 0x4200, 0], 0x4600),
    ("add.f16x2 %r0, %r1, %r2", [0x3c00_4000, 0x3c00_3c00, 0], 0x4000_4200),
    ("max.bf16x2 %r0, %r1, %r2", [0x3f80_c000, 0x4000_3f80, 0], 0x4000_3f80),
];

const CONVERSIONS: &[(&str, [u64; 3], u64)] = &[
    ("cvt.s64.s32 %rd0, %r1", [s(-2), 0, 0], (-2i64) as u64),
    ("cvt.u64.u32 %rd0, %r1", [s(-2), 0, 0], 0xffff_fffe),
    ("cvt.s32.s8 %r0, %r1", [0x1ff, 0, 0], s(-1)),
    ("cvt.u32.u8 %r0, %r1", [0x1ff, 0, 0], 0xff),
    ("cvt.u32.u64 %r0, %rd1", [1 << 40 | 9, 0, 0], 9),
    ("cvt.sat.u8.s32 %r0, %r1", [300, 0, 0], 255),
    ("cvt.sat.s8.s32 %r0, %r1", [s(-300), 0, 0], s(-128)),
    ("cvt.rn.f32.s32 %f0, %r1", [16_777_217, 0, 0], f(16_777_216.0)),
    ("cvt.rn.f32.u64 %f0, %rd1", [u64::MAX, 0, 0], f(18_446_744_073_709_551_616.0)),
    ("cvt.rn.f64.s32 %fd0, %r1", [s(-5), 0, 0], d(-5.0)),
    ("cvt.rzi.s32.f32 %r0, %f1", [f(-2.7), 0, 0], s(-2)),
    ("cvt.rni.s32.f32 %r0, %f1", [f(2.5), 0, 0], 2),
    ("cvt.rmi.s32.f32 %r0, %f1", [f(-2.1), 0, 0], s(-3)),
    ("cvt.rpi.s32.f32 %r0, %f1", [f(2.1), 0, 0], 3),
    ("cvt.rzi.u32.f32 %r0, %f1", [f(-5.0), 0, 0], 0),
    ("cvt.rzi.s32.f32 %r0, %f1", [f(1e20), 0, 0], 0x7fff_ffff),
    ("cvt.rzi.s32.f32 %r0, %f1", [NAN, 0, 0], 0),
    ("cvt.rzi.s64.f64 %rd0, %fd1", [d(-1e15), 0, 0], (-1_000_000_000_000_000i64) as u64),
    ("cvt.rni.f32.f32 %f0, %f1", [f(3.5), 0, 0], f(4.0)),
    ("cvt.rmi.f32.f32 %f0, %f1", [f(-3.5), 0, 0], f(-4.0)),
    ("cvt.sat.f32.f32 %f0, %f1", [f(-3.5), 0, 0], 0),
    ("cvt.f64.f32 %fd0, %f1", [f(0.1), 0, 0], d(0.1f32 as f64)),
    ("cvt.rn.f32.f64 %f0, %fd1", [d(0.1), 0, 0], f(0.1)),
    ("cvt.rn.bf16.f32 %rs0, %f1", [0x3f80_8000, 0, 0], BF16_ONE),
    ("cvt.rn.bf16.f32 %rs0, %f1", [0x3f81_8000, 0, 0], 0x3f82),
    ("cvt.rz.bf16.f32 %rs0, %f1", [0x3f80_ffff, 0, 0], BF16_ONE),
    ("cvt.rn.f16.f32 %rs0, %f1", [f(65504.0), 0, 0], 0x7bff),
    ("cvt.rn.f16.f32 %rs0, %f1", [f(65520.0), 0, 0], 0x7c00),
    ("cvt.rn.bf16x2.f32 %r0, %f1, %f2", [f(2.0), f(1.0), 0], 0x4000_3f80),
    ("cvt.rn.f16x2.f32 %r0, %f1, %f2", [f(2.0), f(1.0), 0], 0x4000_3c00),
    ("cvt.f32.f16 %f0, %rs1", [HALF_ONE, 0, 0], f(1.0)),
    ("cvt.f32.bf16 %f0, %rs1", [BF16_ONE, 0, 0], f(1.0)),
    ("cvt.rna.tf32.f32 %f0, %f1", [0x3f80_1000, 0, 0], 0x3f80_2000),
];

/// Comparisons, whose result is a predicate.
const COMPARISONS: &[(&str, [u64; 3], u64)] = &[
    ("setp.lt.s32 %p0, %r1, %r2", [s(-1), 1, 0], 1),
    ("setp.lt.u32 %p0, %r1, %r2", [s(-1), 1, 0], 0),
    ("setp.lo.u64 %p0, %rd1, %rd2", [1, u64::MAX, 0], 1),
    ("setp.gt.s64 %p0, %rd1, %rd2", [1, u64::MAX, 0], 1),
    ("setp.eq.f32 %p0, %f1, %f2", [NAN, NAN, 0], 0),
    ("setp.equ.f32 %p0, %f1, %f2", [NAN, f(1.0), 0], 1),
    ("setp.ne.f32 %p0, %f1, %f2", [NAN, f(1.0), 0], 0),
    ("setp.neu.f32 %p0, %f1, %f2", [NAN, f(1.0), 0], 1),
    ("setp.geu.f32 %p0, %f1, %f2", [f(1.0), f(2.0), 0], 0),
    ("setp.ltu.f64 %p0, %fd1, %fd2", [d(f64::NAN), d(1.0), 0], 1),
    ("setp.num.f32 %p0, %f1, %f2", [f(1.0), INFINITY, 0], 1),
    ("setp.nan.f32 %p0, %f1, %f2", [f(1.0), NAN, 0], 1),
    ("setp.gt.bf16 %p0, %rs1, %rs2", [0x4000, BF16_ONE, 0], 1),
    ("setp.lt.and.s32 %p0, %r1, %r2, !%p1", [1, 2, 0], 0),
    ("setp.lt.or.s32 %p0|%p2, %r1, %r2, %p1", [3, 2, 0], 1),
    ("xor.pred %p0, %p1, %p1", [0, 0, 0], 0),
];

/// A kernel that runs an instruction: `%p1` is true.
fn kernel(instruction: &str) -> String {
    let store = match instruction.split_whitespace().nth(1).unwrap().trim_matches(['{', ',']) {
        name if name.starts_with("%rd0") => "st.global.u64 [%rd9], %rd0;",
        name if name.starts_with("%rs0") => "cvt.u64.u16 %rd0, %rs0; st.global.u64 [%rd9], %rd0;",
        name if name.starts_with("%r0") => "cvt.u64.u32 %rd0, %r0; st.global.u64 [%rd9], %rd0;",
        name if name.starts_with("%fd0") => "st.global.f64 [%rd9], %fd0;",
        name if name.starts_with("%f0") => {
            "mov.b32 %r0, %f0; cvt.u64.u32 %rd0, %r0; st.global.u64 [%rd9], %rd0;"
        }
        _ => "selp.b64 %rd0, 1, 0, %p0; st.global.u64 [%rd9], %rd0;",
    };
    let mut loads = String::new();
    for i in 1..4 {
        loads += &format!(
            "ld.global.u64 %rd{i}, [%rd8+{}]; cvt.u32.u64 %r{i}, %rd{i}; cvt.u16.u32 %rs{i}, %r{i};
             mov.b32 %f{i}, %r{i}; mov.b64 %fd{i}, %rd{i};\n",
            (i - 1) * 8
        );
    }
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 a, .param .u64 b) {{
        .reg .pred %p<4>; .reg .b16 %rs<4>; .reg .b32 %r<4>; .reg .b64 %rd<10>; .reg .f32 %f<4>; .reg .f64 %fd<4>;
        ld.param.u64 %rd8, [a]; ld.param.u64 %rd9, [b]; setp.eq.u32 %p1, 0, 0;
        {loads} {instruction}; {store} ret; }}"
    )
}

#[test]
fn results() {
    let mut wrong = Vec::new();
    for (instruction, operands, expected) in
        [INTEGERS, FLOATS, CONVERSIONS, COMPARISONS].into_iter().flatten()
    {
        let mut device = Device::new(&kernel(instruction));
        let (input, out) = (device.put(operands), device.empty::<u64>(1));
        device.launch("k", [1, 1, 1], [1, 1, 1], &[Address(input), Address(out)]);
        device.assert_clean();
        let found = device.get::<u64>(out, 1)[0];
        if found != *expected {
            wrong.push(format!("{instruction} of {operands:x?}: {found:#x} instead of {expected:#x}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn lanes_that_are_not_active_keep_their_registers() {
    // Lane 1 of 3 skips the addition; lane 2 has ended.
    let text = ".version 8.0\n.target sm_80\n.visible .entry k(.param .u64 a) {
        .reg .pred %p<3>; .reg .b32 %r<4>; .reg .b64 %rd<3>;
        ld.param.u64 %rd1, [a]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
        setp.eq.u32 %p1, %r1, 2; mov.u32 %r2, 7; st.global.u32 [%rd1], %r2; @%p1 exit;
        setp.eq.u32 %p2, %r1, 1; @!%p2 add.u32 %r2, %r2, %r1; add.u32 %r2, %r2, 1;
        st.global.u32 [%rd1], %r2; ret; }";
    let mut device = Device::new(text);
    let out = device.empty::<u32>(4);
    device.launch("k", [1, 1, 1], [4, 1, 1], &[Address(out)]);
    device.assert_clean();
    assert_eq!(device.get::<u32>(out, 4), [8, 8, 7, 11]);
}
