//! Layouts against what they promise, and the search against brute force.

use crate::generator::Generator;
use phalanx_plan::{BLOCK, ChunkError, ChunkLayout, ChunkSize, ParameterSize, Search, lay_out};

fn sizes(elements: &[u64]) -> Vec<ParameterSize> {
    let one = |(i, e): (usize, &u64)| ParameterSize::new(format!("p{i}"), *e);
    elements.iter().enumerate().map(one).collect()
}

/// GPT-2 in execution order: embeddings, blocks, last norm.
fn gpt2(layers: usize, hidden: u64) -> Vec<ParameterSize> {
    let mut elements = vec![50257 * hidden, 1024 * hidden];
    for _ in 0..layers {
        let h = hidden;
        elements.extend([h, h, 3 * h * h, 3 * h, h * h, h, h, h, 4 * h * h, 4 * h, 4 * h * h, h]);
    }
    elements.extend([hidden, hidden]);
    sizes(&elements)
}

/// Checks the properties that hold for every layout.
fn check(parameters: &[ParameterSize], world: u64, layout: &ChunkLayout) {
    let unit = BLOCK * world;
    let elements: u64 = parameters.iter().map(|p| p.elements).sum();
    assert_eq!(layout.waste_elements, layout.padded_elements() - elements);
    assert_eq!(layout.placed.len(), parameters.len());

    let mut canonical = 0;
    for (number, parameter) in parameters.iter().enumerate() {
        let placed = layout.placed[number];
        assert_eq!((placed.parameter, placed.elements), (number, parameter.elements));
        assert_eq!(placed.offset % BLOCK, 0);
        let blocks = layout.blocks_of_parameter(number);
        assert_eq!(blocks, canonical..canonical + parameter.elements.div_ceil(BLOCK));
        assert_eq!(layout.canonical_block(placed.chunk, placed.offset / BLOCK), Some(blocks.start));
        canonical = blocks.end;
    }
    assert_eq!(layout.blocks, canonical);

    let mut seen = vec![0; parameters.len()];
    let mut blocks = 0;
    for chunk in 0..layout.chunks() {
        let whole = layout.chunk_elements[chunk];
        assert!(whole > 0 && whole.is_multiple_of(unit));
        let held = layout.blocks_of_chunk(chunk);
        assert_eq!(held.start, blocks);
        assert!((held.end - held.start) * BLOCK <= whole);
        assert_eq!(layout.canonical_block(chunk, held.end - held.start), None);
        blocks = held.end;
        let mut end = 0;
        for rank in 0..world {
            let shard = layout.shard(chunk, rank, world);
            assert_eq!(shard.start, end);
            assert_eq!((shard.end - shard.start) % BLOCK, 0);
            end = shard.end;
            for segment in layout.segments(chunk, shard.clone()) {
                let placed = layout.placed[segment.parameter];
                assert_eq!(placed.chunk, chunk);
                assert!(shard.start <= segment.in_chunk.start && segment.in_chunk.end <= shard.end);
                assert_eq!(segment.in_chunk.start, placed.offset + segment.in_parameter.start);
                assert_eq!(segment.in_chunk.end, placed.offset + segment.in_parameter.end);
                assert_eq!(segment.in_parameter.start, seen[segment.parameter], "a gap or an overlap");
                assert!(segment.in_parameter.end > segment.in_parameter.start);
                seen[segment.parameter] = segment.in_parameter.end;
            }
        }
        assert_eq!(end, whole);
    }
    assert_eq!(blocks, layout.blocks);
    let expected: Vec<u64> = parameters.iter().map(|p| p.elements).collect();
    assert_eq!(seen, expected);
}

#[test]
fn small_layouts_are_as_drawn() {
    // (elements in blocks, chunk size in blocks, world) -> (chunks in blocks, chunk of each parameter)
    type Case = (&'static [u64], u64, u64, &'static [u64], &'static [usize]);
    let rows: [Case; 7] = [
        (&[1, 1, 1, 1], 2, 1, &[2, 2], &[0, 0, 1, 1]),
        (&[1, 1, 1], 2, 1, &[2, 1], &[0, 0, 1]),
        (&[2, 2, 2], 3, 1, &[3, 3, 2], &[0, 1, 2]),
        // A huge parameter closes the chunk before it and has its own; the next parameter starts a new one.
        (&[1, 9, 1], 4, 2, &[4, 10, 2], &[0, 1, 2]),
        // The last chunk is the giant's: the one before is not trimmed.
        (&[1, 9], 4, 2, &[4, 10], &[0, 1]),
        // A size beyond the model is cut to the model, and rounded up to the world.
        (&[1, 1, 1], 1 << 40, 2, &[4], &[0, 0, 0]),
        (&[1, 1, 1], 1, 4, &[4], &[0, 0, 0]),
    ];
    for (elements, size, world, chunk_blocks, chunk_of) in rows {
        let parameters = sizes(&elements.iter().map(|b| b * BLOCK - 1).collect::<Vec<_>>());
        let layout = lay_out(&parameters, world, &ChunkSize::Elements(size * BLOCK)).unwrap();
        let got: Vec<u64> = layout.chunk_elements.iter().map(|e| e / BLOCK).collect();
        assert_eq!(got, chunk_blocks, "{elements:?} in {size} on {world}");
        let got: Vec<usize> = layout.placed.iter().map(|p| p.chunk).collect();
        assert_eq!(got, chunk_of, "{elements:?} in {size} on {world}");
        check(&parameters, world, &layout);
    }
}

#[test]
fn every_layout_covers_every_element_once() {
    let mut random = Generator(1);
    for _ in 0..400 {
        let count = random.within(1, 60);
        let largest = [10, 5_000, 60_000, 900_000][random.within(0, 3) as usize];
        let elements: Vec<u64> = (0..count).map(|_| random.within(1, largest)).collect();
        let parameters = sizes(&elements);
        let world = random.within(1, 9);
        let knobs = Search { hidden_dim: Some(random.within(1, 9_000)), ..Search::default() };
        let size = random.within(1, 2 * largest);
        for size in [ChunkSize::None, ChunkSize::Elements(size), ChunkSize::Auto(knobs)] {
            let layout = lay_out(&parameters, world, &size).unwrap();
            check(&parameters, world, &layout);
        }
    }
}

#[test]
fn canonical_blocks_do_not_depend_on_world_or_size() {
    let parameters = gpt2(3, 96);
    let blocks = |layout: ChunkLayout| -> Vec<_> {
        (0..parameters.len()).map(|p| layout.blocks_of_parameter(p)).collect()
    };
    let reference = blocks(lay_out(&parameters, 1, &ChunkSize::None).unwrap());
    for world in 1..=8 {
        for size in [ChunkSize::None, ChunkSize::Elements(123_456), ChunkSize::Auto(Search::default())] {
            assert_eq!(blocks(lay_out(&parameters, world, &size).unwrap()), reference);
        }
    }
}

/// The search, written naively from its description: real layouts, one for each size.
fn brute_force(parameters: &[ParameterSize], world: u64, start: u64, step: u64, end: u64) -> (u64, u64) {
    let of = |size| (lay_out(parameters, world, &ChunkSize::Elements(size)).unwrap().waste_elements, size);
    (0..).map(|i| start + i * step).take_while(|size| *size <= end).map(of).min().unwrap()
}

#[test]
fn the_search_finds_the_first_chunk_size_with_the_smallest_waste() {
    let mut random = Generator(2);
    for _ in 0..60 {
        let world = random.within(1, 5);
        let unit = BLOCK * world;
        let count = random.within(20, 80);
        let elements: Vec<u64> = (0..count).map(|_| random.within(1, 40) * random.within(1, 4_000)).collect();
        let parameters = sizes(&elements);
        let hidden = random.within(1, 20_000);
        let knobs = Search { hidden_dim: Some(hidden), ..Search::default() };
        let layout = lay_out(&parameters, world, &ChunkSize::Auto(knobs)).unwrap();

        let padded: Vec<u64> = elements.iter().map(|e| e.next_multiple_of(BLOCK)).collect();
        let count = count as f64;
        let mean = padded.iter().sum::<u64>() as f64 / count;
        let sigma = (padded.iter().map(|p| (*p as f64 - mean).powi(2)).sum::<f64>() / count).sqrt();
        let kept: Vec<u64> = padded.into_iter().filter(|p| *p as f64 <= mean + 3.0 * sigma).collect();
        let eighth = kept.iter().sum::<u64>() / 8;
        let start = eighth.max(*kept.iter().max().unwrap()).next_multiple_of(unit);
        let (waste, size) =
            brute_force(&parameters, world, start, hidden.next_multiple_of(unit), start + eighth);
        assert_eq!(layout.waste_elements, waste);
        let chosen = layout.searched.iter().find(|c| c.waste_elements == waste).unwrap();
        assert_eq!(chosen.chunk_elements, size);
        assert_eq!(layout, {
            let mut again = lay_out(&parameters, world, &ChunkSize::Elements(size)).unwrap();
            again.searched = layout.searched.clone();
            again
        });
    }
}

#[test]
fn small_models_have_several_chunks_and_little_waste() {
    for (layers, hidden, world) in [(2, 64, 1), (4, 128, 2), (6, 384, 8), (12, 768, 8), (24, 1024, 64)] {
        let parameters = gpt2(layers, hidden);
        let layout = lay_out(&parameters, world, &ChunkSize::Auto(Search::default())).unwrap();
        check(&parameters, world, &layout);
        assert!(layout.chunks() >= 3, "{layers} x {hidden} on {world}: {} chunks", layout.chunks());
        let min_waste = layout.searched.iter().map(|c| c.waste_elements).min();
        assert_eq!(Some(layout.waste_elements), min_waste);
    }
}

#[test]
fn mistakes_are_named() {
    let one = sizes(&[5]);
    let auto = |search_range_mb, min_chunk_size_mb, hidden_dim| {
        ChunkSize::Auto(Search { search_range_mb, min_chunk_size_mb, hidden_dim })
    };
    let rows = [
        (lay_out(&[], 1, &ChunkSize::None), "no parameters"),
        (lay_out(&sizes(&[3, 0]), 1, &ChunkSize::None), "`p1` has no elements"),
        (lay_out(&one, 0, &ChunkSize::None), "by 0 ranks"),
        (lay_out(&one, u64::MAX, &ChunkSize::None), "1 to 1048576"),
        (lay_out(&sizes(&[7, u64::MAX]), 1, &ChunkSize::None), "at parameter `p1`"),
        (lay_out(&one, 1, &ChunkSize::Elements(0)), "`chunk_elements` is 0"),
        (lay_out(&one, 1, &auto(f64::NAN, 1.0, None)), "`search_range_mb` is NaN"),
        (lay_out(&one, 1, &auto(1.0, -2.0, None)), "`min_chunk_size_mb` is -2"),
        (lay_out(&one, 1, &auto(1.0, 1.0, Some(0))), "`hidden_dim` is 0"),
    ];
    for (result, expected) in rows {
        let error: ChunkError = result.unwrap_err();
        assert!(error.to_string().contains(expected), "{error} lacks {expected}");
    }
    // Absurd but meaningful values are bounded by the model.
    let layout = lay_out(&one, 3, &auto(1e300, 1e300, Some(u64::MAX))).unwrap();
    check(&one, 3, &layout);
    check(&one, 1, &lay_out(&one, 1, &ChunkSize::Elements(u64::MAX)).unwrap());
}
