//! What the launcher of another host sends: a message that is read is read the same from its own bytes, and nothing is allocated
//! for lengths that the bytes only claim.
#![no_main]

use libfuzzer_sys::fuzz_target;
use phalanx_launch::Message;

fuzz_target!(|bytes: &[u8]| {
    if let Some(message) = Message::decode(bytes) {
        assert_eq!(Message::decode(&message.encode()), Some(message));
    }
});
